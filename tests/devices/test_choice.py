"""Which device a worker has, and which workers share a process, without a device."""

from datetime import timedelta

import pytest
import torch
from torch import nn

from pipedream_rt import ConfigError, plan_for
from pipedream_rt.cluster.environment import own_device
from pipedream_rt.devices import HOST, OwnDevice, choice, device_for
from pipedream_rt.devices.hosted import on_host
from pipedream_rt.devices.randomness import has_drawn, random_state, set_random_state
from pipedream_rt.job.devices import devices_of, shared_seats
from pipedream_rt.job.process_assignment import assignment_for
from pipedream_rt.models.tensors import is_away

PLAN = plan_for("async-1f1b", num_stages=4, per_update=1)
PARTS = [nn.Linear(2, 2) for _ in range(4)]


@pytest.fixture
def two(monkeypatch):
    """Two accelerators of the kind ``xpu``, of which only the names are there."""
    monkeypatch.setattr(choice, "_kind", lambda: "xpu")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)


def names(devices, plan=PLAN, here=True):
    return devices_of(devices, plan, PARTS, here)


def test_the_host_is_no_device_to_speak_of():
    assert names(None) == names("cpu") == names(["cpu"] * 4) == ()
    assert device_for((), 0, OwnDevice(), [[0]], threaded=False, name="w") is HOST
    own = OwnDevice("cpu")
    assert device_for(("xpu:0",), 0, own, [[0]], threaded=False, name="w") is HOST


def test_a_name_without_a_number_is_dealt_to_neighbours(two):
    assert names("xpu") == ("xpu:0", "xpu:0", "xpu:1", "xpu:1")
    assert names(["xpu", "cpu", "xpu", "xpu"]) == ("xpu:0", "cpu", "xpu:0", "xpu:1")
    assert names(torch.device("xpu:1")) == ("xpu:1",) * 4
    assert names("xpu", plan_for("async-1f1b", num_stages=1, per_update=1)) == ("xpu:0",)


def test_workers_elsewhere_have_what_is_there(two):
    assert names("cuda", here=False) == ("cuda",) * 4
    assert names("cuda:7", here=False) == ("cuda:7",) * 4
    with pytest.raises(ConfigError, match="'gpu' is no device"):
        names("gpu", here=False)


def test_stages_of_one_worker_have_one_device(two):
    plan = plan_for("interleaved-1f1b", num_stages=4, per_update=4)
    assert names(["xpu:0", "xpu:1", "xpu:0", "xpu:1"], plan) == ("xpu:0", "xpu:1")
    assert names(["xpu:1", "cpu"], plan) == ("xpu:1", "cpu")
    with pytest.raises(ConfigError, match=r"worker 0 .* stage 0 on xpu:0, stage 2 on xpu:1"):
        names(["xpu:0", "xpu:1", "xpu:1", "xpu:1"], plan)


def test_a_device_is_chosen_by_the_number_of_a_process(two):
    assert choice.device_there("xpu", 3) == torch.device("xpu:1")
    assert choice.device_there("xpu:0", 3) == torch.device("xpu:0")
    for name in ("cuda", "cuda:0"):
        words = f"'{name}' cannot be used: .* of kind 'cuda'; .* cpu, xpu:0, xpu:1"
        with pytest.raises(ConfigError, match=words):
            choice.device_there(name)
    with pytest.raises(ConfigError, match=r"'xpu:2' cannot be used: .* less than 2; .* xpu:1"):
        choice.device_there("xpu:2")
    with pytest.raises(ConfigError, match="'meta:0' cannot be used: nothing is computed on"):
        choice.device_there("meta:0")


def test_workers_on_one_accelerator_share_a_process():
    assert shared_seats(("a:0", "a:1", "a:0", "cpu", "cpu")) == ((0, 2), (1,), (3,), (4,))
    assignment = assignment_for(5, None, timedelta(), ((0, 2), (1,), (3,), (4,)))
    assert (assignment.fewest, assignment.most) == (4, 4)
    assert assignment.workers_by_process(5, 4) == ((0, 2), (1,), (3,), (4,))
    with pytest.raises(ConfigError, match="share a process, so their number is fixed"):
        assignment_for(2, (1, 2), timedelta(), ((0, 1),))


def test_what_a_process_was_told(monkeypatch):
    for name in ("PIPEDREAM_RT_DEVICE", "LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    assert own_device() == (None, 0)
    monkeypatch.setenv("SLURM_LOCALID", "2")
    assert own_device() == (None, 2)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("PIPEDREAM_RT_DEVICE", "cuda:1")
    assert own_device() == ("cuda:1", 3)


def test_values_on_the_host_stay_what_they_are():
    value = {"x": torch.ones(2), "y": (1, torch.empty(2, device="meta"))}
    assert on_host(value) is value
    assert not is_away(value["y"][1])


def test_the_random_state_of_this_process():
    state = random_state()
    assert not has_drawn(state)
    drawn = torch.rand(3)
    assert has_drawn(state)
    set_random_state(state)
    assert torch.equal(torch.rand(3), drawn)
