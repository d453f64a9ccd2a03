"""The end of a job is told to whoever knows its secret, and to nobody else."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest
from support.callers import OTHER, SECRET, asked, calling, hello, soon
from support.deadlines import LATEST_S

from pipedream_rt.cluster.addresses import listening
from pipedream_rt.cluster.dial import DialOptions, JobOver, NotAdmitted
from pipedream_rt.cluster.listener import announce_end
from pipedream_rt.cluster.worker.joining import JoinAttempts, WorkerSettings, serve_at
from pipedream_rt.errors import PipelineError

pytestmark = pytest.mark.threads


@pytest.fixture
def listener():
    with listening("127.0.0.1", 0) as listener:
        yield listener


@pytest.fixture
def address(listener):
    """Where it listens, found out here: a thread would ask a listener that is closed meanwhile."""
    return listener.getsockname()


@pytest.fixture
def thread():
    with ThreadPoolExecutor() as threads:
        yield threads.submit


def life(address, name, secret=SECRET):
    """Be a worker; return the error that it ends with."""
    host, port = address
    place = DialOptions(f"{host}:{port}", LATEST_S, persist=False)
    with pytest.raises(PipelineError) as e:
        serve_at(place, WorkerSettings(name, 1, secret), JoinAttempts())
    return e.value


def test_every_worker_hears_how_the_script_has_ended(listener, address, thread):
    with ExitStack() as ends:
        strangers = [ends.enter_context(socket.create_connection(address)) for _ in range(2)]
        strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
        telling = thread(announce_end, listener, SECRET, 7, 2, soon())
        # While it is told: afterwards nobody is there who would refuse.
        refused = life(address, "c-0", OTHER)
        assert isinstance(refused, NotAdmitted)
        assert "one end does not know the secret" in str(refused)
        ended = [thread(life, address, name) for name in ("a-0", "b-1")]
        for each in ended:
            assert isinstance(each.result(LATEST_S), JobOver)
            assert each.result().code == 7
        assert telling.result(LATEST_S) == 2


def test_nodes_are_counted_and_not_their_workers(listener, address, thread):
    telling = thread(announce_end, listener, SECRET, 0, 2, soon())
    assert [life(address, name).code for name in ("a-0", "a-1", "a-10")] == [0, 0, 0]
    assert not telling.done()
    assert life(address, "b-0").code == 0
    assert telling.result(LATEST_S) == 2


def test_any_version_of_a_worker_is_told_and_a_name_that_is_none_does_not_count(
    listener, address, thread
):
    telling = thread(announce_end, listener, SECRET, 3, 1, soon())
    with closing(calling(address)) as control:
        answer = asked(control, hello("\x1b[2J-0"))
        assert answer["type"] == "refused"
        assert "its hello makes no sense: its 'name' is" in answer["reason"]
    assert not telling.done()
    with closing(calling(address)) as control:
        said = hello("a-0", version=1, software="torch 1.13.0", job="f" * 32)
        assert asked(control, said) == {"type": "over", "code": 3}
    assert telling.result(LATEST_S) == 1


def test_who_does_not_come_is_not_awaited_for_ever(listener):
    assert announce_end(listener, SECRET, 0, 1, soon(0.2)) == 0


def test_strangers_who_keep_coming_do_not_put_off_the_end(listener, address, crowd):
    with crowd(address):
        assert announce_end(listener, SECRET, 0, 1, soon(0.5)) == 0
