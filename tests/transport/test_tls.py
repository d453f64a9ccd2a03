"""Encryption: who does not know the secret is refused, and what was changed is not decrypted."""

import random
import ssl

import pytest
from support.encrypted import OTHER, SECRET, shake_hands, shaken

from pipedream_rt.transport.tls import TlsEngine, problem_of_tls


def opened(engine):
    """All that an engine can decrypt now."""
    room, found = memoryview(bytearray(1 << 14)), b""
    while count := engine.read_into(room):
        found += room[:count]
    return found


def test_what_goes_in_comes_out_both_ways():
    caller, called = shaken()
    for one, other in ((caller, called), (called, caller)):
        data = random.Random(1).randbytes(300_000)
        one.write(data)
        other.take(one.sealed())
        assert opened(other) == data
        assert one.sealed() == b""
        assert opened(other) == b""


def test_it_comes_out_however_it_was_cut():
    caller, called = shaken()
    caller.write(b"some words")
    found = b""
    for byte in caller.sealed():
        assert found == b""
        called.take(bytes([byte]))
        found += opened(called)
    assert found == b"some words"


def test_nothing_of_it_can_be_read_on_the_way():
    caller, called = shaken()
    caller.write(b"a secret word" * 100)
    sealed = caller.sealed()
    assert b"secret" not in sealed
    called.take(sealed)
    assert opened(called) == b"a secret word" * 100


def test_each_connection_has_keys_of_its_own():
    caller, called = shaken()
    caller.write(b"some words")
    sealed = caller.sealed()
    _, another = shaken()
    another.take(sealed)
    with pytest.raises(ssl.SSLError):
        opened(another)
    called.take(sealed)
    assert opened(called) == b"some words"


def test_what_comes_back_to_its_sender_is_refused():
    caller, _ = shaken()
    caller.write(b"some words")
    caller.take(caller.sealed())
    with pytest.raises(ssl.SSLError):
        opened(caller)


def test_the_conversation_of_a_caller_is_worth_nothing_to_who_repeats_it():
    caller, called = TlsEngine(SECRET.tls(False), False), TlsEngine(SECRET.tls(True), True)
    said, done = [], False
    while not done:
        caller.shake_hands()
        said.append(caller.sealed())
        called.take(said[-1])
        done = called.shake_hands()
        caller.take(called.sealed())
    caller.write(b"some words")
    said.append(caller.sealed())
    again = TlsEngine(SECRET.tls(True), True)
    with pytest.raises(ssl.SSLError):  # noqa: PT012
        for part in said:
            again.take(part)
            again.shake_hands()


@pytest.mark.parametrize("stranger", ["caller", "called"])
def test_the_certificate_of_another_job(stranger):
    secrets = (OTHER, SECRET) if stranger == "caller" else (SECRET, OTHER)
    with pytest.raises(ssl.SSLError) as caught:
        shaken(*secrets)
    assert "is PIPEDREAM_RT_SECRET the same for all processes" in problem_of_tls(caught.value)


def test_the_other_end_is_told_that_its_certificate_is_of_another_job():
    """By the alert that the end makes which has found it out."""
    caller, called = TlsEngine(SECRET.tls(False), False), TlsEngine(OTHER.tls(True), True)
    caller.shake_hands()
    called.take(caller.sealed())
    called.shake_hands()
    caller.take(called.sealed())
    with pytest.raises(ssl.SSLError):
        caller.shake_hands()
    called.take(caller.sealed())
    with pytest.raises(ssl.SSLError) as told:
        called.shake_hands()
    assert "one end does not know the secret" in problem_of_tls(told.value)


def without_certificate(protocol=ssl.PROTOCOL_TLS_CLIENT):
    """A context that shows nothing, and trusts anybody."""
    context = ssl.SSLContext(protocol)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def test_a_caller_without_a_certificate():
    stranger = TlsEngine(without_certificate(), False)
    called = TlsEngine(SECRET.tls(True), True)
    with pytest.raises(ssl.SSLError) as caught:
        shake_hands(stranger, called)
    assert "one end does not know the secret" in problem_of_tls(caught.value)
    stranger.take(called.sealed())
    with pytest.raises(ssl.SSLError):
        opened(stranger)


def test_a_server_without_a_certificate():
    called = TlsEngine(without_certificate(ssl.PROTOCOL_TLS_SERVER), True)
    with pytest.raises(ssl.SSLError):
        shake_hands(TlsEngine(SECRET.tls(False), False), called)


def test_an_older_version_of_tls_is_not_spoken():
    context = without_certificate()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError) as caught:
        shake_hands(TlsEngine(context, False), TlsEngine(SECRET.tls(True), True))
    assert problem_of_tls(caught.value).startswith("the other end does not speak TLS 1.3")


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 1000, b"SSH-2.0-x\r\n" * 9])
@pytest.mark.parametrize("is_called", [False, True])
def test_an_end_that_does_not_encrypt(junk, is_called):
    engine = TlsEngine(SECRET.tls(is_called), is_called)
    if not is_called:
        engine.shake_hands()
    engine.take(junk)
    with pytest.raises(ssl.SSLError) as caught:
        engine.shake_hands()
    assert problem_of_tls(caught.value).startswith("the other end does not speak TLS 1.3")
