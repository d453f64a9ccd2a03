"""Signatures: what is not signed, comes twice, late or elsewhere, is not accepted."""

import random

import pytest

from pipedream_rt.errors import TransportError
from pipedream_rt.transport.signing import DIGEST, Signer, proof

KEY, OTHER = b"k" * 32, b"x" * 32


def pair(generation=3):
    """What member 1 signs with for member 2, and what member 2 checks with."""
    return Signer(KEY, generation, 1, 2), Signer(KEY, generation, 1, 2)


def test_what_is_signed_is_accepted_in_its_turn():
    ours, theirs = pair()
    for number in range(100):
        theirs.check(ours.sign(b"data", bytes([number])), b"data", bytes([number]))


@pytest.mark.parametrize(
    "other",
    [
        Signer(OTHER, 3, 1, 2),
        Signer(KEY, 4, 1, 2),
        Signer(KEY, 3, 0, 2),
        Signer(KEY, 3, 1, 3),
        Signer(KEY, 3, 2, 1),
    ],
    ids=["another key", "generation", "sender", "recipient", "direction"],
)
def test_what_was_signed_for_something_else_is_refused(other):
    _, theirs = pair()
    with pytest.raises(TransportError, match="from member 1 for member 2 in generation 3"):
        theirs.check(other.sign(b"data"), b"data")


def test_what_comes_twice_or_leaves_one_out_is_refused():
    ours, theirs = pair()
    first, second, third = (ours.sign(b"data") for _ in range(3))
    theirs.check(first, b"data")
    with pytest.raises(TransportError, match="does not come in its turn"):
        theirs.check(first, b"data")
    _, theirs = pair()
    with pytest.raises(TransportError):
        theirs.check(second, b"data")
    _, theirs = pair()
    theirs.check(first, b"data")
    with pytest.raises(TransportError):
        theirs.check(third, b"data")


def test_fuzz():
    """Random, cut, flipped, moved and wrongly signed bytes: none is accepted."""
    draw = random.Random(5)
    stranger = Signer(OTHER, 3, 1, 2)
    for i in range(20_000):
        ours, theirs = pair()
        data = draw.randbytes(draw.randrange(1, 80))
        right = ours.sign(data)
        signature = (
            draw.randbytes(DIGEST),
            right[: draw.randrange(DIGEST)],
            bytes([right[0] ^ (1 << draw.randrange(8))]) + right[1:],
            stranger.sign(data),
            b"",
        )[i % 5]
        with pytest.raises(TransportError):
            theirs.check(signature, data)


def test_parts_of_a_proof_do_not_run_into_each_other():
    assert proof(KEY, b"ab", b"c") != proof(KEY, b"a", b"bc")
    ours, theirs = pair()
    with pytest.raises(TransportError):
        theirs.check(ours.sign(b"ab", b"c"), b"a", b"bc")
