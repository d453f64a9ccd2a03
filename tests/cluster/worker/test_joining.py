"""How a worker waits for a coordinator and is admitted; whole lives are in tests/cluster."""

import secrets
import socket
import threading
from datetime import timedelta

import pytest

from pipedream_rt.cluster import dial
from pipedream_rt.cluster.control import EXIT_COORDINATOR_LOST, LIFE_AGAIN, Control
from pipedream_rt.cluster.dial import DialOptions, JobOver
from pipedream_rt.cluster.keys import NONCE, Handshake, Secret
from pipedream_rt.cluster.worker import joining
from pipedream_rt.cluster.worker.joining import JoinAttempts, Worker
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import ConfigError, PeerLost, PipelineError
from pipedream_rt.transport.tls import Tls

SECRET = Secret.generated()


@pytest.fixture
def pauses(monkeypatch):
    """The pauses that a worker would make, which take no time here."""
    found = []
    monkeypatch.setattr(joining, "pause", found.append)
    monkeypatch.setattr(dial, "pause", found.append)
    return found


@pytest.fixture
def visits(monkeypatch):
    """What the coordinator answers, visit by visit: an error or an exit code."""
    answers = []

    def serve(control, worker, call_timeout, returns):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def connect(place):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            return socket.create_connection(listener.getsockname(), timeout=10)

    monkeypatch.setattr(joining, "serve", serve)
    monkeypatch.setattr(dial, "connect", connect)
    return answers


def serve_at(persist, failures=0):
    tries = JoinAttempts(failures)
    return joining.serve_at(DialOptions("here:1", 1, persist), Worker("w", 1, SECRET), tries)


def test_a_persistent_worker_without_a_place_waits_longer_each_time(pauses, visits):
    visits += [joining.NoPlace("the name 'w' is taken")] * 7 + [0]
    assert serve_at(persist=True) == 0
    assert pauses == [0, 1, 2, 4, 8, 16, 30, 30]


def test_it_goes_on_counting_in_a_new_process_image(pauses, visits):
    visits += [0]
    assert serve_at(persist=True, failures=3) == 0
    assert pauses == [4]


def test_a_worker_that_does_not_persist_ends(pauses, visits):
    visits += [joining.NoPlace("the name 'w' is taken")]
    with pytest.raises(PipelineError, match="taken"):
        serve_at(persist=False)
    assert pauses == [0]


def test_a_refusal_that_does_not_pass_ends_every_worker(pauses, visits):
    visits += [PipelineError("the coordinator refused this worker")]
    with pytest.raises(PipelineError, match="refused"):
        serve_at(persist=True)
    assert pauses == [0]


@pytest.mark.parametrize("shown", ["right", "none", "of another secret", "of other words"])
@pytest.mark.parametrize("passing", [True, False])
def test_a_refusal_is_final_from_somebody_who_knows_the_secret(shown, passing):
    """Anybody may listen where a persistent worker tries again, and send it away."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        coordinator = Control(ours, "the worker")
        asked = secrets.token_bytes(NONCE)
        coordinator.send({"type": "call", "nonce": asked, "salt": bytes(NONCE)})
        said = []

        def refuse():
            hello = coordinator.receive(Deadline(timedelta(seconds=20)))
            refused = {"reason": "the job is full", "passing": passing}
            secret = Secret.generated() if shown == "of another secret" else SECRET
            words = {**refused, "reason": "else"} if shown == "of other words" else refused
            proof = Handshake(secret.key(b""), asked, hello["nonce"]).prove_refusal(words)
            proof = None if shown == "none" else proof
            coordinator.send({"type": "refused", **refused, "proof": proof})
            said.append(hello["name"])

        thread = threading.Thread(target=refuse)
        thread.start()
        control = Control(theirs, "the coordinator", "127.0.0.1")
        with pytest.raises(
            PipelineError, match=r"refused this worker.*: the job is full"
        ) as raised:
            dial.ask_to_join(control, "w", SECRET, None)
        thread.join()
    assert said == ["w"]
    final = shown == "right" and not passing
    assert isinstance(raised.value, joining.NoPlace) == (not final)
    assert ("does not show that it knows the secret" in str(raised.value)) == (shown != "right")


def test_a_coordinator_that_never_listens(pauses):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(
        PeerLost, match=r"no coordinator listened at .* within 0.05 s: connection r"
    ):
        dial.connect(DialOptions(address, 0.05))
    assert max(pauses) <= 0.05  # no longer than is left


def test_a_host_that_is_unknown():
    with pytest.raises(ConfigError, match="is no host"):
        dial.connect(DialOptions("no such host.invalid:1", 1))


@pytest.mark.parametrize("encrypts", [False, True])
def test_what_listens_and_says_nothing_is_told_of(encrypts, monkeypatch):
    """Another program, or a coordinator that expects encryption: each wait has an end."""
    monkeypatch.setattr(dial, "HANDSHAKE_TIMEOUT_S", 0.3)
    tls = Tls.of_process(always=True) if encrypts else None
    worker = Worker("w", 1, SECRET, None, tls)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        words = "the coordinator ended before" if encrypts else "said nothing for 0.2 s.*_TLS must"
        call_timeout = timedelta(seconds=20 if encrypts else 0.2)
        with pytest.raises(joining.NoPlace, match=words):
            joining.serve_at(DialOptions(address, 5, False, call_timeout), worker, JoinAttempts())
    if tls is not None:
        tls.finish(Deadline(timedelta(seconds=20)))


def test_somebody_who_admits_without_a_proof_is_no_coordinator():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        coordinator = Control(ours, "the worker")
        coordinator.send({"type": "call", "nonce": bytes(NONCE), "salt": bytes(NONCE)})
        coordinator.send({"type": "admitted", "proof": bytes(32)})
        control = Control(theirs, "the coordinator", "127.0.0.1")
        with pytest.raises(joining.NoPlace, match="does not know the job's secret, or somebody"):
            dial.ask_to_join(control, "w", SECRET, None)


def test_a_worker_that_has_lost_its_group_tries_often_for_a_while():
    tries = JoinAttempts(5).after(EXIT_COORDINATOR_LOST, now=1000.0)
    assert tries == JoinAttempts(0, lost=1000.0)
    assert tries.pause_s(1000.0) == 0
    pauses = []
    for _ in range(8):
        tries = tries.after(LIFE_AGAIN, now=1001.0)
        pauses.append(tries.pause_s(1001.0))
    assert pauses[0] == 0.1
    assert max(pauses) == pauses[-1] == 0.5
    assert tries.pause_s(1000.0 + joining._EAGER_S) == 30
    assert tries.after(0, now=1001.0) == JoinAttempts()


def test_a_host_that_is_known_may_be_unknown_for_a_while(pauses):
    with pytest.raises(PeerLost, match=r"within 0 s: 'no such host.invalid' is no host now"):
        dial.connect(DialOptions("no such host.invalid:1", 0, known=True))


@pytest.mark.parametrize("knows", [True, False])
def test_a_job_is_over_when_somebody_says_so_who_knows_the_secret(knows):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        coordinator = Control(ours, "the worker")
        coordinator.send({"type": "call", "nonce": bytes(NONCE), "salt": bytes(NONCE)})

        def announce_end():
            hello = coordinator.receive(Deadline(timedelta(seconds=20)))
            secret = SECRET if knows else Secret.generated()
            proof = Handshake(secret.key(b""), bytes(NONCE), hello["nonce"]).prove_over(7)
            coordinator.send({"type": "over", "code": 7, "proof": proof})

        thread = threading.Thread(target=announce_end)
        thread.start()
        control = Control(theirs, "the coordinator", "127.0.0.1")
        with pytest.raises(JobOver if knows else joining.NoPlace) as raised:
            dial.ask_to_join(control, "w", SECRET, None)
        thread.join()
    if knows:
        assert raised.value.code == 7


def test_a_worker_that_may_be_told_the_end_tries_more_often(pauses, visits):
    visits += [joining.NoPlace("the job has its 3 workers")] * 5 + [0]
    place = DialOptions("here:1", 1, longest_pause_s=5)
    assert joining.serve_at(place, Worker("w", 1, SECRET), JoinAttempts()) == 0
    assert pauses == [0, 1, 2, 4, 5, 5]
