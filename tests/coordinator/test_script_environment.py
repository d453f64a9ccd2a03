"""Where a run may write what it was told to, found out before it begins."""

import os
import socket
from pathlib import Path

import pytest

from pipedream_rt.coordinator.script_environment import writable
from pipedream_rt.errors import ConfigError


def test_a_device_in_a_folder_of_somebody_elses_may_be_written_to(monkeypatch):
    """As /dev/null by an ordinary user."""
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) == os.devnull)
    assert writable(os.devnull) == Path(os.devnull)
    with pytest.raises(ConfigError, match="no permission in its folder"):
        writable("/dev/another")


@pytest.mark.parametrize(
    ("name", "words"),
    [("folder", "is a folder"), ("no/file", "no folder .*no$"), ("socket", "it is a socket")],
)
def test_what_can_be_no_file_is_refused(name, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        with pytest.raises(ConfigError, match=words):
            writable(name)
    assert writable("file") == tmp_path / "file"
