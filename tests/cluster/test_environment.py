import base64
import os
import random
import subprocess
import sys
import uuid

import pytest

from pipedream_rt.cluster.environment import (
    SECRET,
    is_token,
    read_secret,
    rpc_of_environment,
    secret_of_environment,
    secret_of_file,
    secret_pipe,
    tls_of_environment,
)
from pipedream_rt.cluster.forked_workers import _environment as fork_server_environment
from pipedream_rt.cluster.keys import Secret
from pipedream_rt.errors import ConfigError

TOKEN = "0a-token-of-these-tests-alone-7f3"


def pipe_with(text):
    """Descriptor of a pipe that holds a text and is closed at the other end."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        stream.write(text)
    return reading


def test_a_secret_comes_out_of_its_pipe_as_it_went_in():
    secret = Secret.generated()
    fd = secret_pipe(secret)
    assert os.get_inheritable(fd)
    assert read_secret(fd) == secret
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)  # it was closed


def test_a_text_of_the_users_gives_the_same_secret_from_a_pipe_and_from_the_environment(
    monkeypatch,
):
    monkeypatch.setenv(SECRET, TOKEN)
    secret = read_secret(None)
    assert secret == secret_of_environment() == read_secret(pipe_with(TOKEN + "\n"))
    assert secret.text == TOKEN


def test_a_secret_that_was_read_is_in_the_environment_no_more(monkeypatch):
    """No child inherits it; and a second pipeline of this process has it still."""
    monkeypatch.setenv(SECRET, TOKEN)
    assert read_secret(None) == read_secret(None) == Secret(TOKEN)
    assert SECRET not in os.environ
    code = f"import os; print({SECRET!r} in os.environ)"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert done.stdout == "False\n"
    assert SECRET not in fork_server_environment()
    for text in (Secret.generated().text, TOKEN):  # as a file has it, with its last line
        monkeypatch.setenv(SECRET, f" {text}\n")
        assert read_secret(None) == Secret(text) == read_secret(secret_pipe(Secret(text)))
    monkeypatch.setenv(SECRET, TOKEN + "another")
    assert SECRET not in fork_server_environment()
    assert read_secret(None).text.endswith("another")


def test_without_a_secret_the_user_is_told_what_to_set(monkeypatch):
    monkeypatch.delenv(SECRET, raising=False)
    assert read_secret(None) is None
    with pytest.raises(ConfigError, match="set PIPEDREAM_RT_SECRET to the same random text"):
        secret_of_environment()


def test_a_short_secret_is_refused_wherever_it_comes_from(monkeypatch):
    monkeypatch.setenv(SECRET, "1234")
    for fd in (None, pipe_with("1234"), pipe_with("")):
        with pytest.raises(
            ConfigError, match=r"must be a random token of at least 32 char.* make one with"
        ):
            read_secret(fd)


@pytest.mark.parametrize(
    "weak",
    [
        "a" * 64,
        "0123456789abcdef" * 4,
        "abababababababababababababababab",
        "secretsecretsecretsecretsecret",
        "12345678901234567890123456789012",
        "hunter2 hunter2 hunter2 hunter2 hunter2",
        "my training job's secret",
        "deadbeef" * 8,
        "x7Kp!9qLm2#vRw5z",
    ],
)
def test_a_secret_that_can_be_guessed_is_refused(monkeypatch, weak):
    monkeypatch.setenv(SECRET, weak)
    with pytest.raises(ConfigError, match="must be a random token of at least 32 characters"):
        read_secret(None)


def test_a_secret_that_a_program_has_drawn_is_taken():
    draw = random.Random(1)
    for _ in range(300):
        for made in (
            draw.randbytes(32).hex(),
            base64.b64encode(draw.randbytes(24)).decode(),
            str(uuid.UUID(bytes=draw.randbytes(16))) + str(uuid.UUID(bytes=draw.randbytes(16))),
        ):
            assert is_token(made), made
    assert all(is_token(draw.randbytes(16).hex()) for _ in range(1000))


@pytest.mark.parametrize("kind", ["pipe", "folder", "nothing", "long"])
def test_a_secret_is_not_waited_for_in_what_is_no_file(kind, tmp_path):
    place = tmp_path / ("x" * 5000 if kind == "long" else "secret")
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    with pytest.raises(ConfigError, match="the secret of the job cannot be read from") as found:
        secret_of_file(place)
    assert len(str(found.value)) < 500


def test_a_secret_of_an_engine_may_be_a_link_and_is_not_for_everybody(tmp_path, monkeypatch):
    monkeypatch.delenv(SECRET, raising=False)
    monkeypatch.setattr("pipedream_rt.cluster.environment._taken", [])
    place, link = tmp_path / "data", tmp_path / "secret"
    place.write_text(TOKEN)
    place.chmod(0o640)
    link.symlink_to(place)
    monkeypatch.setenv("PIPEDREAM_RT_SECRET_FILE", str(link))
    assert read_secret(None) == Secret(TOKEN)
    place.chmod(0o644)
    with pytest.raises(ConfigError, match=f"everybody .* can read the secret: chmod 600 {link}"):
        read_secret(None)


@pytest.mark.parametrize("said", ["a" * 100_000, "no/such/folder"])
def test_a_folder_of_certificates_that_cannot_be_is_told_of(said, monkeypatch):
    monkeypatch.setenv("PIPEDREAM_RT_TLS", said)
    with pytest.raises(ConfigError, match=r"the certificates in .* cannot be used") as found:
        tls_of_environment()
    assert len(str(found.value)) < 1000


@pytest.mark.parametrize(
    ("said", "wish"), [("", "auto"), ("ON", "on"), ("off", "off"), ("On", "on")]
)
def test_what_is_said_of_torch_rpc(said, wish, monkeypatch):
    monkeypatch.setenv("PIPEDREAM_RT_RPC", said)
    assert rpc_of_environment() == wish
