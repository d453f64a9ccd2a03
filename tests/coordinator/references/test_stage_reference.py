"""References to stages: they reach some methods, in the order of the feed, and no others."""

import os
import signal

import pytest
import torch
from support.between import Forward
from support.models import regression
from support.small import small
from torch import nn

from pipedream_rt import Checkpoints, DistributedOptimizer
from pipedream_rt.coordinator.references.stage_reference import REACHED
from pipedream_rt.errors import ConfigError
from pipedream_rt.stage.remote_methods import METHODS

SGD = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})


def open_pipe(model=None, **options):
    return small(model, **{"stages": 2, "optimizer": SGD, **options})


def inputs(pipe):
    return regression(1)[0][0]


@pytest.fixture(
    scope="module", params=["serial", pytest.param("local", marks=pytest.mark.processes)]
)
def pipe(request):
    """One for all that leaves it as it was, but for what it has trained."""
    with open_pipe(workers=request.param) as opened:
        list(opened.train_epoch(regression(5)))
        yield opened


def test_what_methods_return(pipe):
    x, state = inputs(pipe), pipe.state_dict()
    names = []
    for stage in pipe.stages:
        rref = stage.rref
        assert rref.owner_name() == stage.worker
        mine = rref.rpc_sync().parameter_names()
        names += mine
        for name in mine:
            assert torch.equal(rref.rpc_sync().parameter(name), state[name])
        found = rref.rpc_async().state_dict().wait()
        assert set(found) == set(mine)
        assert all(torch.equal(found[name], state[name]) for name in mine)
        sizes = sum(state[name].numel() for name in mine)
        assert rref.remote().num_parameters().to_here() == sizes
        assert rref.rpc_sync().memory()["weights_bytes"] == 4 * sizes
        counts = pipe.statistics()[stage.index]
        versions = rref.rpc_sync().versions()
        assert versions[-1] == counts["updates"]
        assert len(versions) == counts["versions_kept"]
        x = rref.rpc_sync().forward(x)
    assert names == list(state)
    assert torch.equal(x, pipe(inputs(pipe)))


def test_results_can_be_waited_for_in_any_order_and_twice(pipe):
    asked = [stage.rref.rpc_async().num_parameters() for stage in pipe.stages * 2]
    counts = [pending.wait() for pending in reversed(asked)]
    assert counts == counts[:2] * 2 == [pending.wait() for pending in reversed(asked)]
    assert asked[0].owner_name() == pipe.stages[0].worker


@pytest.mark.parametrize("name", ["backward", "step", "load_state_dict", "__call__", "register_x"])
def test_everything_else_is_refused_by_name_with_the_list(pipe, name):
    for methods in (pipe.stages[0].rref.rpc_sync(), pipe.stages[0].rref.remote()):
        if name.startswith("__"):
            with pytest.raises(TypeError):
                methods(inputs(pipe))
            continue
        with pytest.raises(ConfigError, match=f"does not reach '{name}'; it reaches forward, par"):
            getattr(methods, name)
        assert set(dir(methods)) == set(REACHED)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m.forward(), "forward of a stage does not take these arguments"),
        (lambda m: m.forward(torch.ones(3, 99)), "stage 0: RuntimeError: mat1 and mat2"),
        (lambda m: m.parameter("9.weight"), "stage 0 has no parameter '9.weight'; it has 0.weight"),
        (lambda m: m.train(also=True), "train of a stage takes no arguments also"),
        (lambda m: m.train("yes"), "train of a stage takes one bool"),
        (lambda m: m.eval(True), "eval of a stage takes no argument"),
    ],
)
def test_what_makes_no_sense_is_refused_and_the_run_goes_on(pipe, call, words):
    with pytest.raises(ConfigError, match=words):
        call(pipe.stages[0].rref.rpc_sync())
    assert len(list(pipe.train_epoch(regression(2)))) == 2


class Noisy(nn.Module):
    """A layer that adds in training what it draws."""

    def forward(self, x):
        return x + torch.randn(x.shape) * 0.1 if self.training else x


@pytest.mark.processes
@pytest.mark.parametrize("every", [None, 4])
def test_a_result_that_nobody_waited_for_before_a_recovery(tmp_path, every):
    """It is lost, which is said, and not waited for. A mode that was set stays set."""
    kept = every and Checkpoints(tmp_path / "run", every=every)
    with open_pipe(workers="local", max_restarts=1, checkpoint=kept) as pipe:
        for result in pipe.train_epoch(regression(14)):
            if result.step == 2:
                pending = pipe.stages[0].rref.rpc_async().num_parameters()
                mode = pipe.stages[0].rref.rpc_async().train(mode=True)
            if result.step == 10:
                os.kill(pipe.on_stages(lambda module: os.getpid())[1], signal.SIGKILL)
        assert len(pipe.restarts) == 1
        assert mode.wait() is None
        for _ in range(2):
            with pytest.raises(ConfigError, match="num_parameters of stage 0 was lost in a recov"):
                pending.wait()
        assert pipe.stages[0].rref.rpc_sync().num_parameters() > 0


class Counting(nn.Linear):
    """A layer with a state of its own that is no tensor, and that may be asked too often."""

    def get_extra_state(self):
        return {"seen": [1, 2]}

    def set_extra_state(self, state):
        assert state == {"seen": [1, 2]}


def test_state_that_is_no_tensor():
    with open_pipe([Counting(8, 8), nn.Linear(8, 1)]) as pipe:
        found = pipe.stages[0].rref.rpc_sync().state_dict()
        assert found["0._extra_state"] == {"seen": [1, 2]}


def test_a_method_that_raises_ends_nothing(monkeypatch):
    def refuse(stage):
        raise RuntimeError("not now")

    monkeypatch.setitem(METHODS, "memory", refuse)
    with open_pipe() as pipe:
        with pytest.raises(ConfigError, match="memory of stage 0: RuntimeError: not now"):
            pipe.stages[0].rref.rpc_sync().memory()
        assert len(list(pipe.train_epoch(regression(2)))) == 2


def noisy():
    return [nn.Linear(8, 8), Noisy(), nn.Linear(8, 8), Noisy(), nn.Linear(8, 1)]


DATA = [(torch.randn(8, 8), torch.randn(8, 1)) for _ in range(12)]


def trained(asks=False, modes=(), kill=False, **options):
    """The fingerprint of a run in which methods were called; None where it cannot be told."""
    torch.manual_seed(0)
    with open_pipe(noisy(), stages=2, **options) as pipe:
        for result in pipe.train_epoch(DATA):
            if asks:
                for stage in pipe.stages:
                    stage.rref.rpc_sync().state_dict()
                    stage.rref.rpc_async().versions()  # nobody waits for it
                pipe.stages[0].rref.rpc_sync().forward(DATA[0][0])
            elif result.step % 3 == 2:
                pipe.flush()  # as the calls do
            for step, index, name in modes:
                if step == result.step:
                    getattr(pipe.stages[index].rref.rpc_sync(), name)()
            if kill and result.step == 8:
                os.kill(pipe.on_stages(lambda module: os.getpid())[1], signal.SIGKILL)
        assert len(pipe.restarts) == kill
        return pipe.fingerprint().digest


def test_a_run_with_calls_has_the_bits_of_one_without():
    assert trained(asks=True) == trained()
    assert trained(asks=True, schedule="1f1b") == trained(schedule="1f1b")


MODES = [(2, 0, "eval"), (4, 1, "eval"), (6, 0, "train")]


def test_the_mode_of_a_stage_is_its_own():
    with_modes = trained(modes=MODES)
    assert with_modes not in (trained(), trained(modes=MODES[:1]), trained(modes=MODES[1:2]))
    assert with_modes == trained(modes=MODES, workers="serial")


@pytest.mark.processes
@pytest.mark.parametrize("every", [None, 4])
def test_modes_and_calls_survive_a_recovery(tmp_path, every):
    """Also where a checkpoint lies between the call and the recovery."""
    kept = every and Checkpoints(tmp_path / "run", every=every)
    options = {"workers": "local", "max_restarts": 1, "checkpoint": kept}
    assert trained(modes=MODES, kill=True, **options) == trained(modes=MODES)


def test_a_model_given_whole():
    """Its forward holds for whole mini-batches and one mode; all else can be asked."""
    x, model = torch.randn(3, 4), Forward(skipping)
    with open_pipe(model, stages=["b"], example=(x, torch.randn(3, 4))) as pipe:
        rref = pipe.stages[0].rref
        assert rref.rpc_sync().parameter_names() == ["a.weight", "a.bias"]
        for name, given in (("forward", (x,)), ("eval", ()), ("train", (True,))):
            with pytest.raises(ConfigError, match=rf"{name} of a stage alone is for sequences"):
                getattr(rref.rpc_async(), name)(*given)


def skipping(self, x):
    hidden = self.a(x)
    return self.c(torch.relu(self.b(hidden)) + hidden)


def test_replicas_are_one_stage():
    with open_pipe(stages=2, replicas=[2, 1], micro_batches=2) as pipe:
        list(pipe.train_epoch(regression(3)))
        state = pipe.state_dict()
        found = pipe.stages[0].rref.rpc_sync().state_dict()
        assert all(torch.equal(value, state[name]) for name, value in found.items())
        pipe.stages[0].rref.rpc_sync().eval()
        assert not any(each for each in pipe.on_stages(lambda module: module.training)[:2])


@pytest.mark.processes
def test_torch_rpc_can_be_left_out(monkeypatch):
    """Nothing of it is started then; the bits are the same, and two pipelines can be open."""
    expected = trained(workers="serial")
    monkeypatch.setenv("PIPEDREAM_RT_RPC", "off")

    def nothing(*arguments, **options):
        raise AssertionError("torch RPC was used")

    monkeypatch.setattr("pipedream_rt.transport.rpc.endpoint.RPCEndpoint.__init__", nothing)
    monkeypatch.setattr("pipedream_rt.transport.limits.can_reach_itself", nothing)
    with open_pipe(workers="local") as first, open_pipe(workers="local") as second:
        for pipe in (first, second):
            assert len(list(pipe.train_epoch(regression(4)))) == 4
            x = inputs(pipe)
            for stage in pipe.stages:
                assert stage.rref.owner_name() == stage.worker
                x = stage.rref.rpc_sync().forward(x)
                with pytest.raises(ConfigError, match="PIPEDREAM_RT_RPC=off leaves it out"):
                    stage.rref.to_here()
            assert torch.equal(x, pipe(inputs(pipe)))
            references = pipe.parameter_rrefs()
            assert len(references) == len(pipe.state_dict())
            with pytest.raises(ConfigError, match="PIPEDREAM_RT_RPC=off leaves it out"):
                references[0].to_here()
            pipe.optimizer = DistributedOptimizer(torch.optim.SGD, references, lr=0.1)
            assert len(list(pipe.train_epoch(regression(2)))) == 2
    assert trained(workers="local") == expected
    monkeypatch.setenv("PIPEDREAM_RT_RPC", "perhaps")
    with pytest.raises(ConfigError, match="PIPEDREAM_RT_RPC must be on or off, not 'perhaps'"):
        open_pipe(workers="local")
