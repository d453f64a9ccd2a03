"""What a launcher sets in the environment may be wrong; numbers may be as large as they like."""

import pytest
from torch import nn

from pipedream_rt import Pipeline
from pipedream_rt.cluster.environment import LISTEN_FD, socket_of_environment
from pipedream_rt.errors import ConfigError

RANK = {
    "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}  # fmt: skip
RUN = {"PIPEDREAM_RT_LISTEN_FD": "0", "PIPEDREAM_RT_NPROC": "2", "PIPEDREAM_RT_SECRET_FD": "0"}


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({**RUN, "PIPEDREAM_RT_NPROC": "many"}, "PIPEDREAM_RT_NPROC must be an integer"),
        ({"PIPEDREAM_RT_LISTEN_FD": "3"}, "PIPEDREAM_RT_NPROC must be an integer"),
        ({**RUN, "PIPEDREAM_RT_SECRET_FD": "x"}, "PIPEDREAM_RT_SECRET_FD must be an integer"),
        ({**RUN, "PIPEDREAM_RT_SECRET_FD": "77"}, "PIPEDREAM_RT_SECRET_FD is 77, which"),
        ({**RANK, "WORLD_SIZE": "y"}, "WORLD_SIZE must be an integer"),
        ({**RANK, "RANK": "first"}, "RANK must be an integer"),
        ({**RANK, "MASTER_PORT": "http"}, "MASTER_PORT must be an integer"),
        ({"PIPEDREAM_RT_MAX_RESTARTS": "-1"}, "PIPEDREAM_RT_MAX_RESTARTS must be an integer"),
    ],
)
def test_a_variable_that_makes_no_sense_is_named(variables, words, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"^{words}"):
        Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], stages=2, loss_fn=nn.MSELoss())


@pytest.mark.parametrize("fd", ["bad", "closed", "file"])
def test_a_descriptor_that_is_no_socket_of_run_is_named(fd, monkeypatch, tmp_path):
    with (tmp_path / "file").open("w") as file:
        number = {"bad": "-1", "closed": "1000", "file": str(file.fileno())}[fd]
        monkeypatch.setenv(LISTEN_FD, number)
        with pytest.raises(ConfigError, match=LISTEN_FD), socket_of_environment(LISTEN_FD):
            pass


@pytest.mark.parametrize(
    "words",
    [
        "schedule 1f1b --stages 1000000000",
        "schedule 1f1b --micro-batches 1000000000",
        "schedule async-1f1b --updates 1000000000",
        "schedule async-1f1b --slack 1000000000",
        "schedule interleaved-1f1b --stages 60000 --micro-batches 60000 --stages-per-worker 60000",
        "simulate --stages 1000000000",
        "simulate --updates 1000000000",
        "simulate --updates 1000000000 --compare 1f1b,2bw",
        "simulate --schedule 1f1b --replicas 1000000000",
    ],
)
def test_numbers_beyond_all_bounds_are_refused_at_once(call, words):
    text = call(*words.split(), code="--compare" not in words)  # there it is a row of a table
    assert "at the most" in text or "can have" in text
