import dataclasses
import random

import pytest
import torch
from support import messages
from support.messages import head

from pipedream_rt.errors import TransportError
from pipedream_rt.messages.head import LossTask, Mode, OfLoss, Together
from pipedream_rt.messages.message import (
    Activation,
    Command,
    CommandName,
    Failed,
    Gradient,
    Loss,
    Message,
    OfRule,
    Passed,
    Ready,
    Reply,
    Saved,
    Start,
    Target,
)
from pipedream_rt.messages.wire import decode, encode
from pipedream_rt.schedules import EdgeKind

FAILED = Failed(
    address=2, action="F3", type_name="KeyError", text="C:\\U\u00fc \udcff", trace="",
    pickled=b"\x80",
)  # fmt: skip

TRAINED = Passed(0, 1, 2**40, 7, 9)

PAYLOADS = [
    Start(digest=b"\xff" * 32, restore={"folder": "run", "step": 3, "plain": {}}),
    Ready(),
    Activation(head=head(3, [{"lr": 0.1 + 0.2}], position=9), turns=[5, 4], structure=["T", 0],
               requires_grad=[True], trail=[TRAINED, TRAINED._replace(fingerprint="0f")]),
    Activation(head=head(0, mode=Mode.EVALUATE, empty=True), turns=[0]),
    OfRule(values=[[True, False], [{"lr": 0.5}], [3]]),
    Command(position=6, name=CommandName.LOAD_STATE, structure=["d", [["a", ["P", b"x"]]]]),
    Target(structure=["P", None], task=LossTask(share=1 / 3, loss=OfLoss.WHOLE)),
    Target(structure=["P", None], task=LossTask(together=Together(4, 3), metrics=b"f")),
    Gradient(present=[True, False]),
    Loss(loss=None, trail=[TRAINED]),
    Reply(structure=["l", []]),
    Saved(structure=["l", []]),
    FAILED,
    Activation(head=head(1, mode=Mode.INFER), turns=[0], failed=FAILED),
    Loss(loss=None, trail=[TRAINED], failed=FAILED),
]  # fmt: skip


def made(payload, **options):
    kind = EdgeKind.PARTIAL if isinstance(payload, OfRule) else None
    return messages.message(payload, kind=kind, **options)


@pytest.mark.parametrize("payload", PAYLOADS, ids=lambda p: type(p).__name__)
def test_every_payload_goes_round(payload):
    message = made(payload, to=2, sender=-1, number=7, generation=3, tensors=[torch.ones(1)])
    message = dataclasses.replace(message, key=message.key._replace(restores=2))
    found = decode(encode(message), message.tensors)
    assert dataclasses.replace(found, tensors=()) == dataclasses.replace(message, tensors=())
    assert found.tensors[0] is message.tensors[0]
    assert found.key == message.key


def test_what_msgpack_cannot_write_is_refused_with_the_message_named():
    payload = Loss(loss=0.0, trail=[TRAINED._replace(busy_ns=2**70)])
    message = made(payload, to=-1, sender=1, number=7)
    with pytest.raises(TransportError, match="loss 7 from address 1 to the coordinator cannot be"):
        encode(message)


def test_another_format_is_refused():
    import msgpack

    with pytest.raises(TransportError, match=r"has format 99, but .* reads format 17"):
        decode(msgpack.packb([99, 0, 0, 0, 0, 0, 0, []]), [])


def test_fuzz():
    """50,000 random, cut and changed messages: refused, or a message; never anything else."""
    draw = random.Random(2)
    good = [encode(made(payload, to=1, sender=0, number=4, generation=2)) for payload in PAYLOADS]
    refused = 0
    for i in range(50_000):
        data = bytearray(draw.choice(good))
        match i % 4:
            case 0:
                data = bytearray(draw.randbytes(draw.randrange(200)))
            case 1:
                del data[draw.randrange(len(data)) :]
            case 2:
                for _ in range(draw.randrange(1, 4)):
                    data[draw.randrange(len(data))] = draw.randrange(256)
            case 3:  # the heads of lists and texts of 4 GiB
                data[draw.randrange(len(data)) :] = draw.choice([b"\xdd", b"\xdf", b"\xc6"]) + (
                    b"\xff" * 4
                )
        try:
            assert isinstance(decode(bytes(data), []), Message)
            assert i % 4 > 1, "what is random or was cut must be refused"
        except TransportError:
            refused += 1
    assert refused > 30_000
