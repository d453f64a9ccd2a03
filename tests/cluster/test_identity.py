import hashlib
import re
import ssl
import struct
import subprocess
import sys
from datetime import datetime
from types import SimpleNamespace

import pytest
from cryptography import x509
from support.deadlines import LATEST_S
from support.encrypted import shake_hands

from pipedream_rt.cluster import identity
from pipedream_rt.cluster.identity import Secret, is_same_user
from pipedream_rt.errors import ConfigError
from pipedream_rt.transport.tls import TlsEngine

SECRET, OTHER = Secret.generated(), Secret.generated()


def met(calls, called):
    """Let two ends shake hands, and the one that calls read a byte; return their objects of `ssl`.

    Who is refused is in `transport/test_tls.py`.
    """
    ends = TlsEngine(calls, called=False), TlsEngine(called, called=True)
    shake_hands(*ends)
    ends[1].write(b"1")
    ends[0].take(ends[1].sealed())
    assert ends[0].read_into(memoryview(bytearray(1))) == 1
    return [end._tls for end in ends]


def test_members_of_a_job_meet():
    for end in met(SECRET.tls(called=False), SECRET.tls(called=True)):
        assert end.version() == "TLSv1.3"
        assert end.getpeercert()


PRINTED = """
import hashlib, sys
from pipedream_rt.cluster import identity
made = identity._made(identity.Secret(sys.stdin.read()))
print(*(hashlib.sha256(part).hexdigest() for part in made))
"""


def digests(secret):
    return [hashlib.sha256(part).hexdigest() for part in identity._made(secret)]


@pytest.mark.processes
def test_two_processes_make_the_same_bytes_of_key_and_certificate():
    found = subprocess.run(
        [sys.executable, "-c", PRINTED],
        input=SECRET.text, capture_output=True, text=True, check=True, timeout=LATEST_S,
    )  # fmt: skip
    assert found.stdout.split() == digests(SECRET)
    assert not {*digests(SECRET)} & {*digests(OTHER)}


@pytest.mark.parametrize("years", [(1970, 1971), (9000, 9999)])
def test_machines_whose_clock_is_wrong_take_part(years, monkeypatch):
    """Their clock says a time at which the certificate is not valid."""
    builder = x509.CertificateBuilder
    first, last = (datetime(year, 1, 1) for year in years)
    begin, end = builder.not_valid_before, builder.not_valid_after
    monkeypatch.setattr(builder, "not_valid_before", lambda b, _: begin(b, first))
    monkeypatch.setattr(builder, "not_valid_after", lambda b, _: end(b, last))
    calls, called = identity._contexts.__wrapped__(SECRET)[::-1]
    for each in met(calls, called):
        assert str(years[0]) in each.getpeercert()["notBefore"]


def test_no_session_is_resumed():
    calls, called = SECRET.tls(called=False), SECRET.tls(called=True)
    first, _ = met(calls, called)
    assert not first.session.has_ticket
    again = calls.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), session=first.session)
    with pytest.raises(ssl.SSLWantReadError):
        again.do_handshake()
    assert not again.session_reused
    assert not any(end.session_reused for end in met(calls, called))


@pytest.mark.parametrize("text", ["0123456789abcdef" * 4, "0123456789ABCDEF" * 4])
def test_a_secret_is_64_hexadecimal_digits(text):
    assert len(Secret(text).derived(b"x")) == 32
    assert text not in repr(Secret(text))


@pytest.mark.parametrize(
    "text",
    ["", "a text that somebody has thought of", "f" * 63, "f" * 65, "g" * 64, "f" * 64 + "\n",
     " " + "f" * 63, "٣" * 64],
)  # fmt: skip
def test_any_other_text_is_refused_with_the_command_that_makes_one(text):
    with pytest.raises(ConfigError, match=r"64 hexadecimal digits.*openssl rand -hex 32") as e:
        Secret(text)
    assert f"{len(text)} characters" in str(e.value)
    assert not text or text not in str(e.value)


def test_what_is_derived_differs_by_purpose_nonce_and_secret():
    keys = [
        bytes.fromhex(SECRET.text), SECRET.derived(b"identity 1"), SECRET.derived(b"name"),
        SECRET.group_key(b"n"), SECRET.group_key(b"m"), OTHER.group_key(b"n"),
    ]  # fmt: skip
    assert len({*keys}) == 6  # so new secrets differ too
    assert {len(key) for key in keys} == {32}
    assert re.fullmatch("[0-9a-f]{64}", SECRET.text)
    assert re.fullmatch("[0-9a-f]{32}", SECRET.job)
    assert SECRET.job == Secret(SECRET.text).job != OTHER.job


@pytest.mark.parametrize(("user", "expected"), [(1000, True), (0, True), (1001, False)])
def test_the_kernel_says_whose_a_unix_socket_is(user, expected, monkeypatch):
    """A process of another user is in `test_peer_listeners.py`."""
    peer = SimpleNamespace(getsockopt=lambda *_: struct.pack("3i", 1, user, 0))
    monkeypatch.setattr(identity.os, "geteuid", lambda: 1000)
    assert is_same_user(peer) == expected
