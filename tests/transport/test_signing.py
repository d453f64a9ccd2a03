"""What is not signed with the key of the generation, or comes twice, is read no further."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedream_rt.errors import TransportError
from pipedream_rt.transport.signing import Signer, proof

KEY, OTHER = b"k" * 32, b"o" * 32


def pair(generation=3):
    return Signer(KEY, generation, 0), Signer(KEY, generation, 1)


@given(st.binary(max_size=300), st.integers(0, 255))
def test_what_was_signed_is_opened(data, kind):
    ours, theirs = pair()
    found = theirs.open(ours.sign(data, kind))
    assert (found.sender, found.kind, found.data) == (0, kind, data)


def test_a_second_time_is_refused():
    ours, theirs = pair()
    signed = ours.sign(b"once", 0)
    theirs.open(signed)
    with pytest.raises(TransportError, match="message 0 of member 0 has come before"):
        theirs.open(signed)


def test_messages_may_overtake_each_other():
    ours, theirs = pair()
    messages = [ours.sign(bytes([i]), 0) for i in range(200)]
    random.Random(0).shuffle(messages)
    assert sorted(theirs.open(m).data for m in messages) == [bytes([i]) for i in range(200)]


def test_what_is_too_old_to_tell_is_refused_and_memory_is_bounded():
    ours, theirs = pair()
    first = ours.sign(b"", 0)
    for _ in range(30_000):
        theirs.open(ours.sign(b"", 0))
    with pytest.raises(TransportError, match="has come before"):
        theirs.open(first)
    assert len(theirs._seen[0]._recent) <= 2 * 4096 + 1


def test_another_generation_is_refused():
    with pytest.raises(TransportError, match="generation 3, not 4"):
        pair(4)[1].open(pair(3)[0].sign(b"", 0))


@pytest.mark.parametrize("place", range(60))
def test_every_byte_counts(place):
    ours, theirs = pair()
    signed = bytearray(ours.sign(b"some bytes", 1))
    signed[place % len(signed)] ^= 1
    with pytest.raises(TransportError, match="not signed with the key"):
        theirs.open(bytes(signed))


def test_fuzz():
    """100,000 random, cut, flipped, repeated and wrongly signed messages: none is opened."""
    draw = random.Random(5)
    ours, theirs = pair()
    stranger = Signer(OTHER, 3, 0)
    good = [ours.sign(draw.randbytes(draw.randrange(80)), 0) for _ in range(100)]
    for message in good:
        theirs.open(message)
    for i in range(100_000):
        message = draw.choice(good)
        match i % 5:
            case 0:
                junk = draw.randbytes(draw.randrange(200))
            case 1:
                junk = message[: draw.randrange(len(message))]
            case 2:
                place = draw.randrange(len(message))
                junk = message[:place] + bytes([message[place] ^ 0x10]) + message[place + 1 :]
            case 3:
                junk = message  # once more
            case 4:
                junk = stranger.sign(message, 0)
        with pytest.raises(TransportError):
            theirs.open(junk)
    assert len(theirs._seen) == 1


def test_parts_of_a_proof_do_not_run_into_each_other():
    assert proof(KEY, b"ab", b"c") != proof(KEY, b"a", b"bc")
