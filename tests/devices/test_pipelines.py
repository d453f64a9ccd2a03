"""Pipelines whose stages compute on an accelerator: the bits of the host, whatever happens."""

import functools
import gc
import json
import math
import os
import re
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import forked
from support.casts import MEMORY, Cast, Plain, train
from support.deadlines import LATEST_S
from support.device import standin
from support.inside import kill, local_workers, members
from support.models import NoisyEverywhere
from support.pinned import Flat as Pipeline
from support.ports import free_port
from torch import nn

import pipedream_rt
from pipedream_rt import (
    Checkpoints,
    ConfigError,
    Layout,
    NonFiniteLoss,
    Observe,
    Recovery,
    StageFailed,
    Trace,
    Training,
    profile,
)
from pipedream_rt.devices.accelerator import Accelerator, Leaving
from pipedream_rt.devices.randomness import has_drawn, random_state, set_states_there
from pipedream_rt.planning import profiling
from pipedream_rt.tracing.timeline import perfetto
from pipedream_rt.tracing.trace import COMPUTES

pytestmark = [pytest.mark.standin, pytest.mark.usefixtures("environment")]

LAYOUTS = {
    "one": "standin:1",
    "each": "standin",
    "mixed": ["standin:0", "cpu", "standin:1", "standin:0"],
}
ADAMW = (torch.optim.AdamW, {"lr": 0.01})


def net():
    torch.manual_seed(0)
    block = [nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.2), nn.BatchNorm1d(8), nn.GELU()]
    return nn.Sequential(nn.Linear(6, 8), *block, nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def data_of(mini_batches, seed=1):
    torch.manual_seed(seed)
    return [(torch.randn(8, 6), torch.randint(4, (8,))) for _ in range(mini_batches)]


def opened(devices, model=None, **options):
    given = {"stages": 4, "loss_fn": F.cross_entropy, "optimizer": ADAMW, "workers": "serial"}
    return Pipeline(model or net(), devices=devices, **{**given, **options})


def trained(pipe, data=None):
    """The losses of an epoch, and the weights behind it."""
    losses = [result.loss for result in pipe.train_epoch(data or data_of(6))]
    return losses, pipe.state_dict()


def outcome(devices, data=None, **options):
    with opened(devices, **options) as pipe:
        return trained(pipe, data)


@functools.cache
def of_the_host(mini_batches=6, **options):
    return outcome("cpu", data_of(mini_batches), **options)


def assert_same(one, other):
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    for key, value in one[1].items():
        assert other[1][key].is_cpu
        assert torch.equal(value, other[1][key]), key


# -- the bits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "gpipe", "micro_batches": 4},
        {"schedule": "1f1b", "micro_batches": 4},
        {"schedule": "interleaved-1f1b", "micro_batches": 4},
        {"schedule": "zero-bubble", "micro_batches": 4},
        {"schedule": "2bw"},
        {"schedule": "async-1f1b"},
        {"schedule": "async-1f1b+vertical-sync"},
        {"layout": Layout(replicas=2, shard_optimizer=True), "micro_batches": 2},
        {"training": Training(recompute=True, ema=0.9)},
    ],
    ids=lambda options: "-".join(str(value)[:24] for value in options.values()),
)
def test_every_schedule_gives_the_bits_of_the_host(options, layout):
    devices = LAYOUTS[layout]
    if options.get("schedule") == "interleaved-1f1b" and layout == "mixed":
        devices = ["standin:0", "cpu"]  # one for each of the two workers
    assert_same(of_the_host(**options), outcome(devices, **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_the_bits_of_one_stage_on_the_device(dtype):
    options = {"schedule": "1f1b", "micro_batches": 2, "training": Training(autocast=dtype)}
    whole = outcome("standin:0", stages=1, **options)
    assert_same(whole, outcome("standin", **options))


@pytest.mark.processes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_worker_processes_share_one_for_each_device_and_a_killed_one_changes_no_bit(
    layout, tmp_path
):
    data = data_of(18)
    with opened(
        LAYOUTS[layout], workers="local", checkpoint=Checkpoints(tmp_path, every=3),
        recovery=Recovery(max_restarts=2),
    ) as pipe:  # fmt: skip
        losses = []
        for result in pipe.train_epoch(data):
            losses.append(result.loss)
            if result.step == 0:
                assert len(members(pipe)) == {"one": 1, "each": 2, "mixed": 3}[layout]
            if result.step in (4, 8):
                kill(pipe, members(pipe)[-1].name)
        assert_same(of_the_host(mini_batches=18), (losses, pipe.state_dict()))
        assert len(pipe.restarts) == 2


def test_a_run_goes_on_from_a_device_on_the_host_and_back(tmp_path):
    data = data_of(12)
    expected = outcome("cpu", data)
    losses = []
    for first, devices in zip((0, 3, 6, 9), ("standin:0", "cpu", "standin", "cpu"), strict=True):
        kept = Checkpoints(tmp_path, resume=True)
        with opened(devices, checkpoint=kept) as pipe:
            assert pipe.step == first
            given = [pipe.submit(x, y) for x, y in data[first : first + 3]]
            losses += [each.result().loss for each in given]
            pipe.save()
            state = pipe.state_dict()
    assert_same(expected, (losses, state))


class Workspace(torch.autograd.Function):
    """Gives its result, or its gradient, in memory that it writes over for the next micro-batch."""

    @staticmethod
    def forward(ctx, x, memory, forward):
        ctx.memory, ctx.forward = memory, forward
        return memory.copy_(x * 2).detach() if forward else x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        given = gradient * 2
        return given if ctx.forward else ctx.memory.copy_(given).view_as(given), None, None


class Frugal(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.inside, self.forward_too, self.memory = nn.Linear(8, 8), forward, None

    def forward(self, x):
        if self.memory is None or self.memory.shape != x.shape:
            self.memory = torch.zeros_like(x)
        if self.forward_too:
            return Workspace.apply(self.inside(x), self.memory, True)
        return self.inside(Workspace.apply(x, self.memory, False))


def frugal(devices, forward, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), Frugal(forward), nn.Linear(8, 8), nn.Linear(8, 4))
    return outcome(devices, data_of(4), model=model, stages=[1, 2], micro_batches=4, **options)


frugal_on_the_host = functools.cache(functools.partial(frugal, "cpu"))


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "async-1f1b"])
@pytest.mark.parametrize("layout", ["standin:1", "standin", ["standin:0", "cpu", "standin:1"]])
def test_a_layer_may_write_over_what_it_has_given(layout, schedule, forward):
    expected = frugal_on_the_host(forward, schedule=schedule)
    assert_same(expected, frugal(layout, forward, schedule=schedule))


class Spins(nn.Module):
    """Has buffers that are conjugates and negatives of others."""

    def __init__(self):
        super().__init__()
        self.register_buffer("turned", torch.randn(6, dtype=torch.complex64).conj())
        self.register_buffer("back", torch.randn(6, dtype=torch.complex64).conj().imag)

    def forward(self, x):
        return x * self.turned.real + self.back


def test_buffers_that_are_conjugates_are_saved_as_what_they_are(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(Spins(), nn.Linear(6, 4))
    states = []
    for devices in ("standin", "cpu"):
        kept = Checkpoints(tmp_path, resume=True)
        with opened(devices, model, stages=2, checkpoint=kept) as pipe:
            if devices == "standin":
                list(pipe.train_epoch(data_of(2)))
                pipe.save()
            states.append(pipe.state_dict())
    assert_same(([], states[0]), ([], states[1]))
    assert torch.equal(states[0]["0.turned"], model[0].turned)


def test_memory_does_not_grow_with_the_pipelines_of_a_process():
    reserved = []
    for _ in range(4):
        outcome("standin:0", data_of(2))
        gc.collect()
        reserved.append(torch.accelerator.memory_reserved(0))
    assert reserved[-1] < 1.2 * reserved[0]


def test_random_numbers_of_a_device_in_both_halves_of_a_backward_are_refused():
    model = nn.Sequential(nn.Linear(6, 6), NoisyEverywhere(6, 6), nn.Linear(6, 4))
    with (
        opened("standin", model, stages=3, schedule="zero-bubble", micro_batches=3) as pipe,
        pytest.raises(StageFailed, match="draws random numbers both"),
    ):
        list(pipe.train_epoch(data_of(2)))


def test_a_loader_that_draws_on_a_device_goes_on_with_the_same_numbers(tmp_path):
    def loader():
        for _ in range(6):
            yield torch.randn(8, 6, device="standin:1"), torch.randint(4, (8,), device="standin:0")

    found = []
    for stops in ((6,), (3, 6)):
        torch.manual_seed(3)
        losses = []
        for stop in stops:
            kept = Checkpoints(tmp_path / f"{len(stops)}", every=3, resume=True)
            with opened("standin", checkpoint=kept) as pipe:
                for result in pipe.train_epoch(loader()):
                    losses.append(result.loss)
                    if result.step == stop - 1 and stop < 6:
                        break
                state = pipe.state_dict()
            torch.rand(5, device="standin:1")
        found.append((losses[:3] + losses[-3:], state))
    assert_same(*found)


# -- what is given and returned -----------------------------------------------------------------


def test_a_model_on_a_device_computes_there():
    model = net().to("standin:1")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with opened(None, model, optimizer=optimizer) as pipe:
        assert_same(of_the_host(), trained(pipe))
        assert {each["device"] for each in pipe.statistics()} == {"standin:1"}
        model.load_state_dict(pipe.state_dict())
        assert model[0].weight.device == torch.device("standin:1")


def test_a_model_on_several_devices_is_cut_where_they_change():
    model = net()
    for number, layer in enumerate(model):
        layer.to("standin:0" if number < 4 else "standin:1" if number < 7 else "cpu")
    with opened(None, model, stages=[4, 7]) as pipe:
        assert_same(outcome("cpu", stages=[4, 7]), trained(pipe))
        assert [each["device"] for each in pipe.statistics()] == ["standin:0", "standin:1", "cpu"]
    with pytest.raises(ConfigError, match=r"stage 1 has tensors on several devices: .* on"):
        opened(None, model, stages=2)


def test_mini_batches_and_states_may_be_on_a_device():
    with opened("cpu") as pipe:
        expected = trained(pipe)
        evaluated, predicted = pipe.evaluate(data_of(2)), list(pipe.predict(data_of(2)))
    there = [(x.to("standin:1"), y.to("standin:0")) for x, y in data_of(6)]
    with opened("standin") as pipe:
        losses, state = trained(pipe, there)
        assert_same(expected, (losses, state))
        there = [(x.to("standin"), y) for x, y in data_of(2)]
        assert pipe.evaluate(there) == evaluated
        found = list(pipe.predict(there))
        assert all(torch.equal(a, b) for a, b in zip(found, predicted, strict=True))
        assert torch.equal(pipe(there[0][0]), predicted[0])
        pipe.load_state_dict({key: value.to("standin:1") for key, value in state.items()})
        assert_same((losses, state), (losses, pipe.state_dict()))
        first, *_ = pipe.on_stages(lambda module: next(module.parameters()))
        for copy in (pipe.module()[0].weight, first):
            assert torch.equal(copy.cpu(), state["0.weight"])


@pytest.mark.processes
def test_references_lead_to_copies_on_the_host(monkeypatch):
    monkeypatch.setenv("PIPEDREAM_RT_RPC", "on")
    with opened("standin:1", workers="local") as pipe:
        list(pipe.train_epoch(data_of(2)))
        state = pipe.state_dict()
        module = pipe.stages[0].rref.to_here()
        assert torch.equal(module[0].weight, state["0.weight"])
        of_optimizer = next(iter(pipe.optimizer.state_dict()["state"].values()))
        assert of_optimizer["exp_avg"].is_cpu


class Ids(nn.Module):
    """Makes a tensor on a device of its own, and one where its input is."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 10)

    def forward(self, ids):
        places = torch.arange(ids.shape[1], device=ids.device)
        mask = torch.ones(ids.shape[1], 8)
        x = self.embed(ids) + places[None, :, None] * 0.1
        return self.head(torch.relu(self.inner(x * mask.to(x.device)))).mean(1)


@pytest.mark.parametrize("home", ["cpu", "standin:0"])
def test_constants_of_a_recorded_forward_are_where_its_stage_is(home):
    torch.manual_seed(0)
    data = [(torch.randint(10, (8, 5)), torch.randint(10, (8,))) for _ in range(4)]
    found = []
    for devices, where in (("cpu", "cpu"), ("standin", home)):
        torch.manual_seed(2)
        model = Ids().to(where)
        found.append(outcome(devices, data, model=model, stages=3, example=data[0]))
    assert_same(*found)


@pytest.mark.parametrize("schedule", ["1f1b", "async-1f1b"])
def test_modules_that_cast_their_weights_once_are_told_when(schedule):
    options = {"schedule": schedule, "micro_batches": 4, "devices": LAYOUTS["each"]}
    losses, weights, said = train(Cast, **options)
    expected = train(Plain, **{**options, "devices": "cpu"})
    assert_same((losses, weights), expected[:2])
    assert said[-1] == [True, False, False, False] * 9


class Tied(nn.Module):
    """Layers that share weights, one of which refers to its own weakly."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.other.weight = self.one.weight
        self.recurrent = nn.GRU(6, 4, batch_first=True)

    def forward(self, x):
        return self.recurrent(self.other(torch.tanh(self.one(x)))[:, None])[0][:, 0]


def test_a_backend_of_which_memory_cannot_be_assigned_moves_weights_too(monkeypatch):
    torch.manual_seed(0)
    model, found = nn.Sequential(Tied(), nn.Linear(4, 4)), []
    for assigns in (True, False):
        if not assigns:
            monkeypatch.setattr(torch, "_has_compatible_shallow_copy_type", lambda a, b: False)
        found.append(outcome("standin:1", data_of(4), model=model, stages=2))
    assert_same(*found)
    state = found[0][1]
    assert torch.equal(state["0.one.weight"], state["0.other.weight"])


def test_explain_and_statistics_tell_of_the_memory_of_devices():
    with opened(LAYOUTS["mixed"]) as pipe:
        list(pipe.train_epoch(data_of(2)))
        text, counters = pipe.explain(), pipe.statistics()
    head = next(line for line in text.splitlines() if "device peak MiB" in line)
    assert "device MiB" in head
    assert len(re.findall(r"standin:0 .* \d+\.\d +\d+\.\d", text)) == 2
    assert counters[0]["peak_device_memory_bytes"] >= counters[0]["device_memory_bytes"] > 0
    assert "device_memory_bytes" not in counters[1]


def test_a_trace_has_the_spans_of_devices_beside_those_of_the_host(tmp_path):
    with opened(LAYOUTS["mixed"], observe=Observe(trace=True)) as pipe:
        list(pipe.train_epoch(data_of(4)))
        trace = pipe.trace()
    there, host = trace.device_spans, trace.spans
    assert set(there["stage"].tolist()) == {0, 2, 3}
    for stage in (0, 2, 3):
        mine = there[there["stage"] == stage]
        launched = host[host["stage"] == stage]
        computed = np.isin(launched["kind"], COMPUTES)
        of_device = mine[np.isin(mine["kind"], COMPUTES)]
        for name in ("kind", "index", "version"):
            assert of_device[name].tolist() == launched[computed][name].tolist()
        assert (mine["start"] <= mine["end"]).all()
        assert (mine["end"][:-1] <= mine["start"][1:] + 10_000).all()  # one stream; float32
        assert abs(int(mine["start"][0]) - int(launched["start"][0])) < 5e9
    trace.save(tmp_path / "t")
    again = Trace.load(tmp_path / "t")
    assert np.array_equal(again.device_spans, there)
    assert np.array_equal(again.spans, host)
    drawn = json.loads(perfetto(again))["traceEvents"]
    names = {e["args"]["name"] for e in drawn if e["name"] == "thread_name"}
    assert {"stage 0 on its device", "stage 3 on its device"} <= names
    assert "stage 1 on its device" not in names


def test_layers_are_measured_where_the_model_is(monkeypatch):
    monkeypatch.setattr(profiling, "_process_bytes", lambda: 1e6)  # it starts an interpreter
    model = net().to("standin:1")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = profile(model, data_of(1)[0], loss_fn=F.cross_entropy, optimizer=ADAMW)
    assert [each.name for each in found.layers] == [str(n) for n in range(len(model))]
    assert all(each.forward > 0 for each in found.layers)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    data = [(torch.randint(10, (8, 5)), torch.randint(10, (8,))) for _ in range(2)]
    there = profile(Ids().to("standin:0"), data[0], loss_fn=F.cross_entropy)
    assert [each.name for each in there.layers] == ["embed", "inner", "head"]


# -- what goes wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize("workers", ["serial", pytest.param("local", marks=pytest.mark.processes)])
def test_a_loss_that_is_not_finite_is_told_with_its_number(workers):
    data = data_of(6)
    data[3] = (data[3][0] * math.nan, data[3][1])
    with (
        opened("standin", workers=workers, micro_batches=1, corrections=()) as pipe,
        pytest.raises(NonFiniteLoss, match="stage 3: the loss of micro-batch 3 is nan") as caught,
    ):
        list(pipe.train_epoch(data))
    assert (caught.value.stage, caught.value.action) == (3, "F3")


class Fails(nn.Module):
    def forward(self, x):
        if x.shape[0] == 3:
            raise ValueError("three")
        return x


def test_an_error_of_a_layer_names_it_and_the_run_can_be_closed():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), Fails(), nn.Linear(6, 4))
    data = [*data_of(2), (torch.randn(3, 6), torch.randint(4, (3,)))]
    with (
        opened("standin", model, micro_batches=1, corrections=()) as pipe,
        pytest.raises(StageFailed, match=r"stage 2, F2: ValueError: three, in layer '2' \(Fails\)"),
    ):
        list(pipe.train_epoch(data))


def test_a_tensor_that_stays_on_the_host_is_told_of():
    weights = torch.ones(4)
    with (
        opened("standin", loss_fn=lambda y, t: F.cross_entropy(y, t, weight=weights)) as pipe,
        pytest.raises(StageFailed, match=r"register it as a buffer, or write \.to\(x\.device\)"),
    ):
        list(pipe.train_epoch(data_of(2)))


def test_a_device_that_is_not_there_is_refused_with_those_that_are():
    for devices in ("standin:2", "cuda", ["cpu", "standin:7", "cpu", "cpu"]):
        with pytest.raises(ConfigError, match="this process has cpu, standin:0, standin:1"):
            opened(devices)
    with pytest.raises(
        ConfigError, match=r"worker 0 .* hosts stage 0 on standin:0, stage 2 on cpu"
    ):
        opened(["standin:0", *["cpu"] * 3], schedule="interleaved-1f1b", micro_batches=4)


@pytest.mark.processes
def test_a_module_that_uses_the_device_when_imported_spoils_no_worker(tmp_path, monkeypatch):
    """The fork server begins anew without it."""
    info = tmp_path / "uses_a_device-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: uses-a-device\nVersion: 1\nRequires-Dist: torch\n"
    )
    (tmp_path / "uses_a_device.py").write_text("import torch\ntorch.ones(1, device='standin')\n")
    (tmp_path / "script.py").write_text(
        "import uses_a_device, torch\n"
        "from pipedream_rt import Pipeline\n"
        "if __name__ == '__main__':\n"
        "    m = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))\n"
        "    with Pipeline(m, stages=2, loss_fn=torch.nn.functional.mse_loss, devices='standin',\n"
        "                  optimizer=(torch.optim.SGD, {}), workers='local') as pipe:\n"
        "        print(pipe.submit(torch.ones(4, 4), torch.ones(4, 4)).result().loss)\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    monkeypatch.setenv("PYTHONPATH", path)
    command = [sys.executable, "-W", "ignore", tmp_path / "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LATEST_S)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0


@pytest.mark.processes
def test_the_device_of_a_worker_elsewhere_is_none_of_those_that_start_here(monkeypatch):
    monkeypatch.setenv("PIPEDREAM_RT_DEVICE", "standin:7")
    with opened(["standin:1", "cpu"], stages=2, workers="local") as pipe:
        assert [each["device"] for each in pipe.statistics()] == ["standin:1", "cpu"]


# -- workers elsewhere --------------------------------------------------------------------------


@pytest.mark.processes
def test_workers_elsewhere_have_a_device_of_their_own(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    devices = ["standin:1", "standin:0", "cpu"]
    command = [sys.executable, "-m", "pipedream_rt.workers", address]
    started = [
        forked.Popen([*command, "--name", f"w{n}", "--device", device])
        for n, device in enumerate(devices)
    ]
    try:
        expected = outcome("cpu", stages=3)
        recovery = Recovery(start=timedelta(seconds=60))
        with opened(None, stages=3, workers=address, recovery=recovery) as pipe:
            assert_same(expected, trained(pipe))
            assert [each["device"] for each in pipe.statistics()] == devices
    finally:
        assert [each.wait(LATEST_S) for each in started] == [0, 0, 0]


@pytest.mark.processes
@pytest.mark.parametrize("pipelines", [3, pytest.param(250, marks=pytest.mark.stress)])
def test_workers_end_cleanly_right_after_a_backward(pipelines):
    """Autograd's own thread for a device may hold what a backward has left while Python ends."""
    codes = []
    for _ in range(pipelines):
        with opened(["standin:0", "standin:1"], stages=2, workers="local") as pipe:
            list(pipe.train_epoch(data_of(1)))
            workers = list(local_workers(pipe).processes.values())
        codes += [worker.wait(LATEST_S) for worker in workers]
    assert codes == [0] * 2 * pipelines


@pytest.mark.processes
def test_a_script_ends_cleanly_right_after_a_backward_of_its_own():
    body = (
        "import torch, pipedream_rt\n"
        "m = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))\n"
        "p = pipedream_rt.Pipeline(m, stages=2, loss_fn=torch.nn.functional.mse_loss,\n"
        "    optimizer=(torch.optim.SGD, {'lr': 0.1}), workers='serial', devices='standin')\n"
        "print(p.submit(torch.ones(4, 6), torch.ones(4, 6)).result().loss)\n"
    )
    for _ in range(3):
        done = forked.run([sys.executable, "-W", "ignore", "-c", body], timeout=LATEST_S)
        assert done.returncode == 0


# -- the program that is run where there is a GPU -------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize(
    ("case", "told"),
    [
        (
            "bits-of zero-bubble",
            {f"zero-bubble, {each}": True for each in ("1 stage", "killed", "by the host")},
        ),
        pytest.param(
            "bits-of async-1f1b",
            {"async-1f1b, killed": True, "async-1f1b, by the host": True},
            marks=pytest.mark.stress,
        ),
        (
            "ours 2 1f1b",
            {f"{each}, devices": ["standin:0", "standin:1"] for each in ("local", "serial")},
        ),
    ],
)
def test_a_case_of_the_benchmark(case, told):
    root = Path(pipedream_rt.__file__).parent.parent
    command = [sys.executable, "-W", "ignore", root / "benchmarks/devices.py", *case.split()]
    done = forked.run(
        [*command, "--size", "tiny"], capture_output=True, text=True, timeout=LATEST_S, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert {key: found.get(key) for key in told} == told
    assert found["device"] == "stand-in 0"


# -- layers that put tensors elsewhere ------------------------------------------------------------


class Elsewhere(nn.Module):
    """A layer that hands its input on to a device."""

    def __init__(self, device):
        super().__init__()
        self.device = device

    def forward(self, x):
        return x.to(self.device)


class ByHand(nn.Module):
    """A model that is split by hand, as scripts do it."""

    def __init__(self, first, second, hand_over):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(6, 8).to(first)
        self.b = nn.Linear(8, 4).to(second)
        self.hand_over = hand_over

    def forward(self, x):
        return self.b(self.hand_over(torch.relu(self.a(x))))


def plain_losses(model, data, first, second):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to(first)), y.to(second))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("workers", ["serial", pytest.param("local", marks=pytest.mark.processes)])
@pytest.mark.parametrize(
    ("first", "second", "hand_over"),
    [
        ("standin:0", "standin:1", lambda x: x.to("standin:1")),
        ("standin:0", "standin:1", lambda x: x.to(torch.device("standin", 1))),
        ("standin:1", "cpu", lambda x: x.cpu()),
        ("standin:1", "cpu", lambda x: x.to("cpu")),
        ("cpu", "standin:1", lambda x: x.to("standin:1")),
    ],
    ids=["text", "device", "cpu()", "to cpu", "from cpu"],
)
def test_a_model_that_is_split_by_hand_trains_as_it_does_by_itself(
    first, second, hand_over, workers
):
    data = data_of(4)
    expected = plain_losses(ByHand(first, second, hand_over), data, first, second)
    model = ByHand(first, second, hand_over)
    options = {"stages": ["b"], "schedule": "1f1b", "micro_batches": 1, "example": data[0]}
    assert outcome(None, data, model=model, workers=workers, **options)[0] == expected


def test_what_a_layer_or_loss_leaves_on_another_device_is_brought_back():
    options = {"stages": [2], "schedule": "1f1b", "micro_batches": 1}
    expected = outcome("cpu", model=nn.Sequential(net()[0], net()[-1]), **{**options, "stages": 2})
    for there, devices in (
        ("standin:1", ["standin:0", "standin:1"]),
        ("standin:1", ["cpu", "standin:1"]),
        ("cpu", ["standin:0", "standin:0"]),
    ):
        model = nn.Sequential(net()[0], Elsewhere(there), net()[-1])
        assert outcome(devices, model=model, **options)[0] == expected[0]
    loss_fn = lambda out, y: F.cross_entropy(out.to("standin:1"), y.to("standin:1"))  # noqa: E731
    assert outcome("standin:0", loss_fn=loss_fn)[0] == outcome("cpu")[0]


@pytest.mark.parametrize("workers", ["serial", pytest.param("local", marks=pytest.mark.processes)])
def test_a_default_device_is_that_of_the_stage(workers):
    model, data = net().to("standin:0"), data_of(6)
    torch.set_default_device("standin:0")
    try:
        with opened(
            ["standin:0", "standin:1", "standin:1", "standin:0"], model, workers=workers
        ) as pipe:
            assert_same(of_the_host(), trained(pipe, data))
    finally:
        torch.set_default_device("cpu")


def test_a_buffer_with_attributes_is_moved_to_the_host():
    model = net()
    model.register_buffer("table", torch.ones(4, device="standin:0"))
    model.table.tag = "kept"
    with opened("cpu", nn.Sequential(*model, Adds(model.table))) as pipe:
        losses, _ = trained(pipe, data_of(2))
    assert all(map(math.isfinite, losses))


class Adds(nn.Module):
    """A layer that adds a buffer."""

    def __init__(self, table):
        super().__init__()
        self.register_buffer("table", table)

    def forward(self, x):
        return x + self.table


def test_weights_that_were_loaded_are_cast_anew(tmp_path):
    """A run that goes back to a checkpoint has the same mini-batches, and other weights."""
    ends = []
    for kind in (Plain, Cast):
        MEMORY.clear()
        torch.manual_seed(1)
        layers = [kind(number) for number in range(2)]
        data = [(torch.randn(8, 6), torch.randn(8, 6)) for _ in range(4)]
        sgd = (torch.optim.SGD, {"lr": 0.5})
        with Pipeline(
            layers, stages=2, loss_fn=F.mse_loss, optimizer=sgd, schedule="1f1b", micro_batches=2,
            workers="serial",
        ) as pipe:  # fmt: skip
            pipe.submit(*data[0]).result()
            pipe.save(tmp_path / kind.__name__)
            pipe.submit(*data[1]).result()
            pipe.load(tmp_path / kind.__name__)
            ends.append([pipe.submit(*each).result().loss for each in data[1:]])
    assert ends[0] == ends[1]


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.Adam])
def test_a_resumed_optimizer_waits_for_the_device_no_more_than_a_new_one(kind, tmp_path):
    options = {"optimizer": (kind, {"lr": 0.01}), "schedule": "1f1b", "micro_batches": 1}
    waited, batch = [], data_of(1)[0]
    for resumes in (False, True):
        with opened("standin:0", **options) as pipe:
            if resumes:
                pipe.load(tmp_path)
            else:
                pipe.submit(*batch).result()
                pipe.save(tmp_path)
            before = standin.waits()["item"]
            pipe.submit(*batch).result()
            waited.append(standin.waits()["item"] - before)
    assert waited[0] == waited[1]


@pytest.mark.threads
def test_threads_of_a_worker_are_on_its_device(monkeypatch):
    """A thread on another device than its worker's would begin to use that one too."""
    seen, leave = [], Leaving.leave

    def noted(*args):
        seen.append(torch.accelerator.current_device_index())
        leave(*args)

    def writes():
        settled()
        seen.append(torch.accelerator.current_device_index())

    monkeypatch.setattr(Leaving, "leave", noted)
    device = Accelerator(torch.device("standin", 1), (), True, "w")
    device._leaving.put(Leaving(lambda *args: None, print, None, None, (), None))
    settled = device.settle()
    thread = threading.Thread(target=writes)
    thread.start()
    thread.join()
    device.close()
    assert seen == [1, 1]


def test_generator_states_of_another_kind_of_device_are_left():
    before = random_state()
    set_states_there([torch.zeros(16, dtype=torch.uint8)] * 2)
    assert not has_drawn(before)
