"""The nodes of a job on Ray, without Ray: actors are objects, and commands are played."""

import signal
import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest

from pipedream_rt.cluster.engines import ray_nodes
from pipedream_rt.cluster.environment import SECRET
from pipedream_rt.deadline import Deadline


class Remote:
    """A handle of an actor, whose methods are done at once."""

    def __init__(self, actor):
        self._actor = actor

    def __getattr__(self, name):
        return SimpleNamespace(remote=getattr(self._actor, name))


class Engine:
    """What a job asks of `RayWorkers`."""

    def __init__(self, strategy):
        self.strategy, self.placed, self.killed, self.stopped = strategy, [], [], False
        self.lives, self.waited = [], []

    def connected(self):
        def remote(kind):
            made = SimpleNamespace(remote=lambda: Remote(kind()))
            return SimpleNamespace(options=lambda **options: made)

        return SimpleNamespace(
            remote=remote, get=lambda value: value, kill=self.killed.append,
            wait=self.wait,
            util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"),
        )  # fmt: skip

    def wait(self, lives, timeout, num_returns=1):
        self.waited.append((lives, num_returns))
        return lives, []

    def place(self, count, deadline):
        self.placed.append(count)

    def actor(self, kind, index, name):
        self.lives.append(name)
        return Remote(kind())

    def stop(self):
        self.stopped = True


@pytest.fixture
def played(monkeypatch):
    """Plays commands with exit codes; yields what was started, and the engine of the job."""
    found = SimpleNamespace(codes=[], started=[], pauses=[], engine=None)

    def engine(strategy):
        found.engine = Engine(strategy)
        monkeypatch.setitem(sys.modules, "ray", found.engine.connected())
        return found.engine

    def popen(words, *, env, cwd, preexec_fn):
        code = found.codes.pop(0)
        found.started.append(SimpleNamespace(words=words, env=env, cwd=cwd))

        return SimpleNamespace(wait=lambda seconds: code, kill=pytest.fail)

    class Pauses(ray_nodes.Backoff):
        """Pauses that take no time."""

        def after(self, name, lived_s):
            found.pauses.append(super().after(name, lived_s))
            return 0

    monkeypatch.setattr(ray_nodes, "RayWorkers", engine)
    monkeypatch.setattr(ray_nodes.subprocess, "Popen", popen)
    monkeypatch.setattr(ray_nodes, "Backoff", Pauses)
    return found


def run(nodes):
    command, deadline = ("x.py", "--lr", "1"), Deadline(timedelta(seconds=1))
    return ray_nodes.run_on_ray(nodes, ["--nproc-per-node=2"], command, deadline, print)


def after(words, option):
    return words[words.index(option) + 1]


def test_each_node_runs_the_command_with_its_number_and_the_address_of_the_first(played):
    played.codes = [0, 1, 0]
    assert run(3) == 0
    words = [each.words for each in played.started]
    assert [after(each, "--node-rank") for each in words] == ["0", "1", "2"]
    assert {after(each, "--nnodes") for each in words} == {"3"}
    (address,) = {after(each, "--rdzv-endpoint") for each in words}
    assert address.startswith("127.0.0.1:")
    assert all(each[-4:] == ["3", "x.py", "--lr", "1"] for each in words)
    assert all("--nproc-per-node=2" in each for each in words)
    assert (played.engine.strategy, played.engine.placed) == ("SPREAD", [3])
    assert played.engine.lives == ["node-0", "node-1", "node-2"]


def test_when_the_first_node_has_ended_all_others_are_waited_for(played):
    """What stands for the life of a node is the code with which it has ended."""
    played.codes = [0, 1, 5]
    run(3)
    assert played.engine.waited == [([0], 1), ([1, 5], 2)]


def test_the_secret_of_a_job_is_in_no_argument_and_the_same_on_all_nodes(played):
    played.codes = [0, 0]
    run(2)
    (secret,) = {each.env[SECRET] for each in played.started}
    assert len(secret) == 64
    assert not any(secret in word for each in played.started for word in each.words)


@pytest.mark.parametrize("code", [0, 1, 5])
def test_an_end_for_good_is_that_of_the_job_and_nothing_is_left(played, code):
    played.codes = [code]
    assert run(1) == code
    assert played.engine.stopped
    assert len(played.engine.killed) == 1  # the board


def test_a_node_that_was_killed_or_lost_its_workers_is_started_again_later_each_time(played):
    played.codes = [-signal.SIGKILL, 3, 143, 0]
    assert run(1) == 0
    assert len(played.started) == 4
    assert played.pauses == [0, 1, 3]


def test_an_error_leaves_nothing(played, monkeypatch):
    def fails(*_):
        raise KeyError("no room")

    monkeypatch.setattr(Engine, "actor", fails)
    with pytest.raises(KeyError, match="no room"):
        run(1)
    assert played.engine.stopped
    assert len(played.engine.killed) == 1  # the board


def test_a_node_runs_in_the_folder_of_the_command_if_it_has_one(played, tmp_path, monkeypatch):
    played.codes = [0, 0]
    monkeypatch.chdir(tmp_path)
    run(1)
    monkeypatch.setattr(ray_nodes.os, "getcwd", lambda: str(tmp_path / "elsewhere"))
    run(1)
    assert [each.cwd for each in played.started] == [str(tmp_path), None]
