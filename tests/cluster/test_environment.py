import os

import pytest

from pipedream_rt.cluster.environment import (
    SECRET,
    read_secret,
    secret_of_environment,
    secret_pipe,
)
from pipedream_rt.errors import ConfigError

PASSPHRASE = "a secret of these tests alone"


def pipe_with(text):
    """Descriptor of a pipe that holds a text and is closed at the other end."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        stream.write(text)
    return reading


def test_a_secret_comes_out_of_its_pipe_as_it_went_in():
    secret = bytes(range(32))
    fd = secret_pipe(secret)
    assert os.get_inheritable(fd)
    assert read_secret(fd) == secret
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)  # it was closed


def test_a_text_of_the_users_gives_the_same_secret_from_a_pipe_and_from_the_environment(
    monkeypatch,
):
    monkeypatch.setenv(SECRET, PASSPHRASE)
    secret = read_secret(None)
    assert secret == secret_of_environment() == read_secret(pipe_with(PASSPHRASE + "\n"))
    assert len(secret) == 32


def test_without_a_secret_the_user_is_told_what_to_set(monkeypatch):
    monkeypatch.delenv(SECRET, raising=False)
    assert read_secret(None) is None
    with pytest.raises(ConfigError, match="set PIPEDREAM_RT_SECRET to the same random text"):
        secret_of_environment()


def test_a_short_secret_is_refused_wherever_it_comes_from(monkeypatch):
    monkeypatch.setenv(SECRET, "1234")
    for fd in (None, pipe_with("1234"), pipe_with("")):
        with pytest.raises(ConfigError, match="characters, at least 16 are needed; make one with"):
            read_secret(fd)
