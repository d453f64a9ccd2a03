"""What anybody may have put where `pipedream-rt status` looks."""

import contextlib
import os
import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor

import msgpack
import pytest
from click.testing import CliRunner
from support.deadlines import LATEST_S

from pipedream_rt.cli import main
from pipedream_rt.coordinator.recovery import status_server

RIGHT = {
    "pid": 7, "ns": 5, "schedule": "1f1b", "generation": 1, "restarts": 0, "losses": 3, "fed": 4,
    "workers": [{"name": "w", "stages": "stage 0", "process": "pid 8 on h", "silent_s": 0.1,
                 "rss": 100, "doing": "computing"}],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    place = tmp_path / "sockets"
    place.mkdir(mode=0o700)
    monkeypatch.setattr(status_server, "folder", lambda: place)
    return place


@contextlib.contextmanager
def answering(path, data):
    """A server that answers one client with bytes; where none has come, it ends all the same."""
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as threads:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(LATEST_S)

        def serve():
            with listener.accept()[0] as connection:
                connection.sendall(data)

        served = threads.submit(serve)
        try:
            yield
            served.result(LATEST_S)
        finally:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as last:
                last.connect(str(path))


@pytest.mark.threads
@pytest.mark.parametrize(
    "answer",
    [b"", b"\xc1", b"\x91" * 3000 + b"\xc0", msgpack.packb([]), msgpack.packb({}),
     b"\x81\xa8schedule" + b"\x91" * 990 + b"\xc0",
     *(msgpack.packb({**RIGHT, name: wrong}) for name in RIGHT
       for wrong in (None, "\x1b[2J", -1, [], [3], {"a": 1}) if name != "workers" or wrong != []),
     *(msgpack.packb({**RIGHT, "workers": [{**RIGHT["workers"][0], name: wrong}]})
       for name in RIGHT["workers"][0] for wrong in (None, b"x", {}, "\x1b[2J"))],
)  # fmt: skip
def test_an_answer_that_is_none_is_refused(folder, answer):
    with answering(folder / "1-1", answer):
        found = list(status_server.running())
    # Only what a worker does is any text at all, and is escaped where it is shown.
    assert all(record["workers"][0]["doing"] == "\x1b[2J" for _, record in found)


@pytest.mark.threads
def test_what_is_right_is_taken(folder):
    with answering(folder / "1-1", msgpack.packb(RIGHT)):
        assert [record for _, record in status_server.running()] == [RIGHT]


@pytest.mark.parametrize("kind", ["open", "file", "link"])
def test_a_folder_of_somebody_else_is_refused_in_words(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = tmp_path / f"pipedream-rt-{os.geteuid()}"
    if kind == "file":
        place.write_text("in the way")
    elif kind == "link":
        (tmp_path / "elsewhere").mkdir()
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.mkdir()
        place.chmod(0o755)
    done = CliRunner().invoke(main, ["status"])
    assert done.exit_code == 1
    assert done.output.startswith("Error: the pipelines of this user cannot be found: ")


def test_a_pipeline_that_comes_later_takes_the_place_of_no_other(folder):
    servers = [status_server.StatusServer(lambda name=name: {**RIGHT, "schedule": name})
               for name in ("first", "second")]  # fmt: skip
    servers[0].close()
    (folder / f"{os.getpid()}-of somebody").touch()
    servers.append(status_server.StatusServer(lambda: {**RIGHT, "schedule": "third"}))
    found = [record["schedule"] for _, record in status_server.running()]
    for server in servers:
        server.close()
    assert found == ["second", "third"]
