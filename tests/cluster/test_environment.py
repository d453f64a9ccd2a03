import os
import shutil
import subprocess

import pytest

from pipedream_rt.cluster.environment import (
    SECRET,
    read_secret,
    rpc_of_environment,
    secret_of_environment,
    secret_of_file,
    secret_pipe,
)
from pipedream_rt.cluster.forked_workers import _environment as fork_server_environment
from pipedream_rt.cluster.identity import MAKE_SECRET, Secret
from pipedream_rt.errors import ConfigError

TOKEN, OTHER = "7f3" + "0" * 61, "0A" * 32


def pipe_with(text):
    """Descriptor of a pipe that holds a text and is closed at the other end."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w", encoding="utf-8", errors="surrogateescape") as stream:
        stream.write(text)
    return reading


def test_a_secret_comes_out_of_its_pipe_as_it_went_in():
    secret = Secret.generated()
    fd = secret_pipe(secret)
    assert os.get_inheritable(fd)
    assert read_secret(fd) == secret == read_secret(pipe_with(secret.text + "\n"))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)  # it was closed
    with pytest.raises(ConfigError, match="found another text of 0 characters"):
        read_secret(pipe_with(""))


def test_standard_input_stays_open():
    """Else the next file that is opened would be standard input."""
    before = os.dup(0)
    try:
        os.dup2(fd := pipe_with(TOKEN), 0)
        os.close(fd)
        assert read_secret(0) == Secret(TOKEN)
        os.fstat(0)
    finally:
        os.dup2(before, 0)
        os.close(before)


def test_a_secret_that_was_read_is_in_the_environment_no_more(monkeypatch):
    """No child inherits it; and a second pipeline of this process has it still."""
    monkeypatch.setenv(SECRET, TOKEN)
    assert read_secret(None) == read_secret(None) == secret_of_environment() == Secret(TOKEN)
    assert Secret(TOKEN).text == TOKEN
    assert SECRET not in os.environ
    assert SECRET.encode() not in subprocess.check_output(["env"])
    assert SECRET not in fork_server_environment()
    for text in (Secret.generated().text, TOKEN):  # as a file has it, with its last line
        monkeypatch.setenv(SECRET, f" {text}\n")
        assert read_secret(None) == Secret(text) == read_secret(secret_pipe(Secret(text)))
    monkeypatch.setenv(SECRET, OTHER)
    assert SECRET not in fork_server_environment()
    assert read_secret(None).text == OTHER


def test_without_a_secret_the_user_is_told_what_to_set(monkeypatch):
    monkeypatch.delenv(SECRET, raising=False)
    assert read_secret(None) is None
    with pytest.raises(ConfigError, match="set PIPEDREAM_RT_SECRET to the same 64 hexadecimal"):
        secret_of_environment()


NO_SECRETS = {
    "short": "1234",
    "long": TOKEN + "0",
    "of the half": "7f" * 16,
    "words": "my training job's secret",
    "base64": "q83vEjRWeJCrze8SNFZ4kKvN7xI0VniQq83vEjRWeJCrze8SNFZ4kKvN7xI0Vg==",
    "digits of another script": "\u0663" * 64,
    "a line break within": TOKEN[:32] + "\n" + TOKEN[32:],
    "bytes that are no text": "\udcff" * 64,
}


@pytest.mark.parametrize("text", NO_SECRETS.values(), ids=NO_SECRETS)
def test_what_is_not_64_hexadecimal_digits_is_refused_wherever_it_comes_from(
    monkeypatch, tmp_path, text
):
    """The text is not shown: it may be a secret of something else."""
    place = tmp_path / "secret"
    place.write_text(text, "utf-8", "surrogateescape")
    place.chmod(0o600)
    monkeypatch.setenv(SECRET, text)
    for read in (
        lambda: read_secret(None),
        lambda: read_secret(pipe_with(text)),
        lambda: secret_of_file(place),
    ):
        with pytest.raises(
            ConfigError, match=f"must be 64 hexadecimal digits.*with: {MAKE_SECRET}"
        ) as found:
            read()
        assert text not in str(found.value)


def test_the_command_that_is_told_makes_a_secret():
    if shutil.which("openssl") is None:
        pytest.skip("the command openssl is missing")
    made = subprocess.run(MAKE_SECRET.split(), stdout=subprocess.PIPE, text=True, check=True)
    assert Secret(made.stdout.strip()) != Secret.generated()


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


@pytest.mark.parametrize(("said", "wish"), [("", "auto"), ("ON", "on"), ("off", "off")])
def test_what_is_said_of_torch_rpc(said, wish, monkeypatch):
    monkeypatch.setenv("PIPEDREAM_RT_RPC", said)
    assert rpc_of_environment() == wish
