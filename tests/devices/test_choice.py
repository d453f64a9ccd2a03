"""Which device a process computes on, without a device."""

import pytest
import torch
from support.accelerators import two_accelerators

from pipedream_rt import ConfigError
from pipedream_rt.cluster.environment import own_device
from pipedream_rt.devices import HOST, OwnDevice, choice, device_for
from pipedream_rt.devices.hosted import on_host
from pipedream_rt.devices.randomness import has_drawn, random_state, set_random_state
from pipedream_rt.models.tensors import is_away


@pytest.fixture
def two(monkeypatch):
    two_accelerators(monkeypatch)


def test_the_host_is_no_device_to_speak_of():
    assert device_for((), 0, OwnDevice(), [[0]], threaded=False, name="w") is HOST
    own = OwnDevice("cpu")
    assert device_for(("xpu:0",), 0, own, [[0]], threaded=False, name="w") is HOST


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
