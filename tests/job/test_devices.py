"""Which device each worker of a plan computes on, without a device."""

from datetime import timedelta

import pytest
import torch
from support.accelerators import two_accelerators
from torch import nn

from pipedream_rt import ConfigError, plan_for
from pipedream_rt.job.devices import devices_of, shared_seats
from pipedream_rt.job.process_assignment import assignment_for

PLAN = plan_for("async-1f1b", num_stages=4, per_update=1)
PARTS = [nn.Linear(2, 2) for _ in range(4)]


@pytest.fixture
def two(monkeypatch):
    two_accelerators(monkeypatch)


def names(devices, plan=PLAN, here=True, parts=PARTS):
    return devices_of(devices, plan, parts, here)


def test_the_host_is_no_device_to_speak_of():
    assert names(None) == names("cpu") == names(["cpu"] * 4) == ()


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


def test_workers_on_one_accelerator_share_a_process():
    assert shared_seats(("a:0", "a:1", "a:0", "cpu", "cpu")) == ((0, 2), (1,), (3,), (4,))
    assignment = assignment_for(5, None, timedelta(), ((0, 2), (1,), (3,), (4,)))
    assert (assignment.fewest, assignment.most) == (4, 4)
    assert assignment.workers_by_process(5, 4) == ((0, 2), (1,), (3,), (4,))
    with pytest.raises(ConfigError, match="share a process, so their number is fixed"):
        assignment_for(2, (1, 2), timedelta(), ((0, 1),))


def test_without_a_word_stages_compute_where_their_tensors_are():
    """Tensors on the meta device are nowhere yet; a stage without tensors is on the host."""
    assert names(None, parts=[nn.Linear(2, 2, device="meta"), nn.ReLU(), *PARTS[:2]]) == ()


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        (3, "must be the name of a device, or a list .*, not 3"),
        (["cpu"] * 3, "devices has 3 names, and the plan has 4 stages on 4 workers"),
        ([], "devices has 0 names"),
    ],
)
def test_what_names_no_device_for_each_stage_is_refused(devices, words):
    with pytest.raises(ConfigError, match=words):
        names(devices)


def test_processes_are_as_many_as_workers_where_no_device_is_shared():
    assert shared_seats(()) == shared_seats(("a:0", "a:1")) == shared_seats(("cpu", "cpu")) == ()
