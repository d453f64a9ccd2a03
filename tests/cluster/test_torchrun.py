"""Where the ranks of torchrun join rank 0, as its store tells them."""

import os
import socket
import stat
import tempfile
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.callers import asked, control_plane, hello, in_loop, soon
from support.ports import free_port
from torch.distributed import HashStore

from pipedream_rt.cluster import torchrun
from pipedream_rt.cluster.control import Control
from pipedream_rt.cluster.dial import DialOptions, reached
from pipedream_rt.cluster.environment import private_folder
from pipedream_rt.cluster.identity import Secret
from pipedream_rt.cluster.listener import Listener
from pipedream_rt.errors import ConfigError, RendezvousTimeout
from pipedream_rt.job.process_assignment import ProcessAssignment

SECRET = Secret("5a" * 32)
NAME = f"ranks-{SECRET.job}"


@pytest.fixture
def place(monkeypatch):
    """The folder in which that of this user's sockets is; its name is short."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture
def ranks(monkeypatch):
    """Be one of two ranks on this machine, without a secret; what would become of a worker."""
    for name in ("PIPEDREAM_RT_SECRET", "PIPEDREAM_RT_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2"), ("MASTER_ADDR", "::1")):
        monkeypatch.setenv(name, value)
    became = []
    monkeypatch.setattr(torchrun, "_run_worker", lambda *how: became.append(how))
    return became


def join(said):
    """Be rank 1, where the store says something under rank 0's key; None for nothing."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.1))
    if said is not None:
        store.set("key", said)
    torchrun._join_rank_0(store, "key", 1, 1)


@pytest.mark.parametrize("folder", ["open", "a file", "long"])
def test_a_user_without_a_folder_for_sockets_is_told_what_to_set(folder, place, monkeypatch):
    """As where somebody else has made the folder that this user's sockets would be in."""
    if folder == "long":
        place = place / ("x" * 120)
        place.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(place))
    own = place / f"pipedream-rt-{os.geteuid()}"
    if folder == "a file":
        own.touch()
    elif folder == "open":
        own.mkdir()
        own.chmod(0o777)
    with (
        pytest.raises(ConfigError, match="set TMPDIR to a folder of yours"),
        torchrun._listening(SECRET),
    ):
        pass


def test_rank_0_listens_where_its_user_alone_can_come(place):
    with torchrun._listening(SECRET) as listener:
        path = listener.getsockname()
        assert path == str(private_folder() / NAME)
        assert stat.S_IMODE(os.stat(private_folder()).st_mode) == 0o700
        assert SECRET.text not in path
    assert list(private_folder().iterdir()) == []


def test_a_rank_joins_at_the_socket_that_the_store_names(place, ranks):
    join(NAME)
    assert ranks == [(f"unix:{private_folder() / NAME}", 1, 1, None)]


@pytest.mark.parametrize(
    "said",
    [
        b"", b"/etc/passwd", b"../" + NAME.encode(), NAME.encode() + b"/", NAME.encode() + b"\n",
        NAME.encode() + b"\0", b"\xff" * 38, b"ranks-", b"29500", NAME.upper().encode(),
        b"x" * 100_000,
    ],
    ids=lambda said: said[:12].decode("ascii", "replace"),
)  # fmt: skip
def test_what_is_the_name_of_no_socket_of_rank_0_is_not_connected_to(said, place, ranks):
    """Anybody may write into torchrun's store."""
    with pytest.raises(RendezvousTimeout, match="does not say under 'key' where") as found:
        join(said)
    assert ranks == []
    assert len(str(found.value)) < 400
    assert str(found.value).isprintable()


def test_a_rank_for_whom_rank_0_opens_nothing_in_time(place, ranks):
    with pytest.raises(RendezvousTimeout, match="rank 0 opened no pipeline in time"):
        join(None)


def test_ranks_with_a_secret_meet_at_a_port(ranks, monkeypatch):
    """As on several machines; a rank without the secret is told what to set."""
    monkeypatch.setenv("PIPEDREAM_RT_SECRET", SECRET.text)
    join(b"29500")
    for said in (b"no port", b"", NAME.encode()):
        with pytest.raises(RendezvousTimeout, match="does not say under 'key' where"):
            join(said)
    assert ranks == [("[::1]:29500", 1, 1, SECRET)]
    monkeypatch.setattr("pipedream_rt.cluster.environment._taken", [])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(RendezvousTimeout, match=r"rank 1 cannot join rank 0: .*openssl rand"):
        join(b"29500")


@pytest.mark.threads
def test_the_admission_of_a_rank_brings_the_secret_and_that_of_a_stranger_nothing(
    place, monkeypatch
):
    """A process of another user, should the folder not keep it out, gets no word."""
    with control_plane() as control, torchrun._listening(SECRET) as bound:
        listener = in_loop(control, Listener, SECRET, bound)
        listener.roster.most = 1
        in_loop(control, listener.open)
        at = DialOptions(f"unix:{bound.getsockname()}", 1)
        rank = reached(at, "rank 0", None)
        assert asked(rank, hello("rank-1", job=SECRET.job)) == {
            "type": "admitted", "secret": SECRET.text
        }  # fmt: skip
        other_job = reached(at, "rank 0", None)
        refusal = asked(other_job, hello("rank-2", job=Secret("6b" * 32).job))
        assert "it belongs to another job" in refusal["reason"]
        monkeypatch.setattr("pipedream_rt.cluster.reception.is_same_user", lambda connection: False)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(bound.getsockname())
            stranger = Control(connection, "rank 0")
            with pytest.raises(Exception, match="closed the connection"):
                stranger.receive(soon())
        for each in (rank, other_job):
            each.close()
        control.run(listener.close())


OF_RANKS = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture
def environment_of(monkeypatch):
    """Have these variables in the environment, and no others of a launcher."""
    monkeypatch.setattr(torchrun, "_ranks_used", False)
    monkeypatch.setattr("pipedream_rt.cluster.environment._taken", [])
    for name in ("PIPEDREAM_RT_SECRET", "PIPEDREAM_RT_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)

    def be(**variables):
        for name in torchrun._VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return be


def spec_of():
    return SimpleNamespace(
        assignment=ProcessAssignment(fewest=2, most=2), plan=SimpleNamespace(in_words="2 stages"),
        threads=1, start_timeout=timedelta(seconds=0.5),
    )  # fmt: skip


def test_a_world_of_one_waits_for_nobody(environment_of):
    environment_of(**{**OF_RANKS, "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"})
    assert not torchrun.under_torchrun()
    environment_of(**{**OF_RANKS, "WORLD_SIZE": "", "RANK": ""})
    assert not torchrun.under_torchrun()
    environment_of(**OF_RANKS)
    assert torchrun.under_torchrun()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "this process would be rank 0 of 2 and wait for the others, which nobody has started.*"
         "RANK=0, WORLD_SIZE=2, LOCAL_RANK=0, MASTER_ADDR=127.0.0.1.*"
         "type: unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR. For 2"),
        ({"RANK": "1"}, "this process would be rank 1 of 2 .*RANK=1, WORLD_SIZE=2.*type: unset"),
        ({"RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "RANK is 2 and WORLD_SIZE 2, .*type: unset"),
        ({"WORLD_SIZE": "0", "LOCAL_WORLD_SIZE": "0"}, "RANK is 0 and WORLD_SIZE 0, .*type: unset"),
        ({"WORLD_SIZE": "9", "LOCAL_WORLD_SIZE": "9"},
         "need 2 or 3 ranks, there are 9;.*WORLD_SIZE=9.*unset"),
    ],
)  # fmt: skip
def test_ranks_that_make_no_sense_are_refused_before_anything_waits(environment_of, changes, words):
    environment_of(**{**OF_RANKS, **changes})
    with pytest.raises(ConfigError, match=words):
        torchrun.ranks_of_torchrun(spec_of())


def test_a_rank_that_leaves_the_pipeline_to_rank_0_is_refused_alike(environment_of):
    environment_of(**{**OF_RANKS, "RANK": "2", "LOCAL_WORLD_SIZE": "2"})
    with pytest.raises(ConfigError, match="RANK is 2 and WORLD_SIZE 2"):
        torchrun.become_worker(1, timedelta(seconds=0.5))


@pytest.mark.threads
@pytest.mark.parametrize("rank", ["0", "1"])
def test_ranks_that_do_not_come_in_time_are_told_with_what_the_environment_says(
    environment_of, rank
):
    port = str(free_port())
    environment_of(**{**OF_RANKS, "RANK": rank, "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": port})
    words = (
        f"rank {rank} of 2 has not met the others at MASTER_ADDR '127.0.0.1'.*"
        f"MASTER_PORT={port}. If another job has left that behind, type: unset RANK"
    )
    with pytest.raises(RendezvousTimeout, match=words):
        torchrun.ranks_of_torchrun(spec_of())
