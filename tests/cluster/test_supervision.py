"""The end of a job is told to whoever knows its secret, and to nobody else."""

import socket
import threading
from datetime import timedelta

import pytest

from pipedream_rt.cluster.addresses import listening
from pipedream_rt.cluster.dial import DialOptions, JobOver
from pipedream_rt.cluster.keys import Secret
from pipedream_rt.cluster.supervision import announce_end
from pipedream_rt.cluster.worker.joining import JoinAttempts, Worker, serve_at
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import PipelineError
from pipedream_rt.transport.tls import Tls

SECRET = Secret.generated()


def soon(seconds=20):
    return Deadline(timedelta(seconds=seconds))


@pytest.mark.parametrize("encrypts", [False, True])
def test_every_worker_hears_how_the_script_has_ended(encrypts):
    ended = {}
    with listening("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]

        def life(name, secret):
            tls = Tls.of_process(always=True) if encrypts else None
            place = DialOptions(f"127.0.0.1:{port}", 20, persist=False)
            try:
                serve_at(place, Worker(name, 1, secret, None, tls), JoinAttempts())
            except PipelineError as error:
                ended[name] = error

        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
        strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
        who = {"a-0": SECRET, "b-1": SECRET, "c-0": Secret.generated()}
        threads = [threading.Thread(target=life, args=each) for each in who.items()]
        for each in threads:
            each.start()
        tls = Tls.of_process(always=True) if encrypts else None
        assert announce_end(listener, SECRET.job_key(), 7, 2, soon(), tls) == 2
    for each in threads:
        each.join()
    for each in strangers:
        each.close()
    assert [type(ended[name]) for name in ("a-0", "b-1")] == [JobOver, JobOver]
    assert ended["a-0"].code == 7
    assert not isinstance(ended["c-0"], JobOver)


def test_who_does_not_come_is_not_awaited_for_ever():
    with listening("127.0.0.1", 0) as listener:
        assert announce_end(listener, SECRET.job_key(), 0, 1, soon(0.2)) == 0
