"""What is said of messages in words, which of them leave no trace, and digests of tensors."""

import hashlib

import pytest
import torch
from support.messages import gradient, message

from pipedream_rt.messages.message import CommandName, Key, Ready, digest_of
from pipedream_rt.schedules import COORDINATOR, Edge, EdgeKind


def of_bytes(*texts):
    return [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts]


def test_a_digest_is_that_of_all_bytes_behind_their_lengths():
    expected = hashlib.sha256(bytes([0] * 7 + [2]) + b"ab" + bytes([0] * 7 + [1]) + b"c")
    assert digest_of(of_bytes(b"ab", b"c")) == expected.digest()
    assert digest_of([]) == hashlib.sha256().digest()


def test_other_tensors_have_another_digest_though_their_bytes_are_the_same():
    digests = {digest_of(of_bytes(*each)) for each in ((b"ab", b"c"), (b"a", b"bc"), (b"abc",))}
    digests.add(digest_of([*of_bytes(b"abc"), torch.zeros(0, dtype=torch.uint8)]))
    assert len(digests) == 4


def test_messages_and_keys_are_named_for_people():
    assert str(gradient(7, sender=2, to=1)) == "gradient 7 from address 2 to address 1"
    ready = message(Ready(), to=COORDINATOR, sender=0, number=0)
    assert str(ready) == "ready 0 from address 0 to the coordinator"
    key = Key(Edge(EdgeKind.GRADIENT, 2, 1), 7)
    assert key.words(lambda address: f"stage {address}") == "gradient 7 from stage 2"


def test_a_message_that_is_sent_again_after_a_restore_is_another_one():
    edge = Edge(EdgeKind.WEIGHT, 2, 1)
    assert Key(edge, 7, restores=1) != Key(edge, 7) == Key(edge, 7, restores=0)


@pytest.mark.parametrize(
    "name",
    [
        CommandName.FLUSH, CommandName.LOAD_STATE, CommandName.LOAD_OPTIMIZER_STATE,
        CommandName.OPTIMIZER, CommandName.TRAINING, CommandName.LOAD, CommandName.KEEP,
        CommandName.DROP, CommandName.END_CACHE, CommandName.DEFINE, CommandName.CALL,
    ],
    ids=lambda name: name.value,
)  # fmt: skip
def test_a_recovery_repeats_commands_that_may_have_changed_a_stage(name):
    assert not name.leaves_no_trace
