"""The face of the pipeline, in one thread."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from support.models import (
    OPTIMIZERS,
    MakePair,
    Noisy,
    NoisySGD,
    UsePair,
    batches,
    kitchen_sink,
    mlp,
    regression,
)
from support.pinned import Pipeline
from torch import nn

from pipedream_rt import (
    PipelineClosed,
)
from pipedream_rt.serial.cluster import SerialCluster

pytestmark = pytest.mark.threads


def open_pipe(model=None, **kwargs):
    defaults = {
        "stages": 3,
        "loss_fn": F.mse_loss,
        "optimizer": (torch.optim.SGD, {"lr": 0.1}),
        "workers": functools.partial(SerialCluster, shuffle_seed=0),
    }
    return Pipeline(model or mlp(), **{**defaults, **kwargs})


def test_results_come_in_order_and_all_of_them():
    with open_pipe() as pipe:
        results = list(pipe.train_epoch(regression(9)))
        assert [r.step for r in results] == list(range(9))
        assert all(isinstance(r.loss, float) for r in results)
        more = list(pipe.train_epoch(regression(2)))
        assert [r.step for r in more] == [9, 10]
        assert len(more[0].busy_s) == 3


def test_a_layer_that_stands_in_the_model_twice():
    """Whether both places fall into one stage or into two."""
    torch.manual_seed(0)
    relu = nn.ReLU()
    layers = [nn.Linear(8, 8), relu, nn.Linear(8, 8), relu, nn.Linear(8, 8)]
    expected = nn.Sequential(*layers)(torch.ones(2, 8))
    for stages in (1, [2], [1, 3]):
        with open_pipe(layers, stages=stages) as pipe:
            assert torch.equal(pipe(torch.ones(2, 8)), expected)


def test_a_tensor_that_crosses_twice_has_its_gradients_summed_as_in_the_unsplit_model():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            h = self.linear(x)
            return h, h

    class Three(nn.Module):
        def forward(self, pair):
            u, v = pair
            return u.exp() + v.sin() + u.tanh()

    torch.manual_seed(0)
    model = nn.Sequential(Twice(), Three())
    states = []
    for stages in (1, 2):
        with open_pipe(model, stages=stages, schedule="1f1b") as pipe:
            list(pipe.train_epoch(regression(5)))
            states.append(pipe.state_dict())
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])


def test_what_backward_and_the_optimizer_draw_is_seeded_too():
    """Noise in a hook and in step; the user's own draws between do not matter."""
    states = []
    for draws in (0, 5):
        torch.manual_seed(0)
        with open_pipe(nn.Sequential(Noisy(), nn.Linear(8, 8)), optimizer=(NoisySGD, {"lr": 0.1}),
                       stages=2) as pipe:  # fmt: skip
            for _ in pipe.train_epoch(regression(5)):
                torch.rand(draws)
            states.append(pipe.state_dict())
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])


def test_muon_and_other_optimizers_that_look_at_shapes():
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    with open_pipe(model, optimizer=(torch.optim.Muon, {"lr": 0.1})) as pipe:
        assert len(list(pipe.train_epoch(regression(3)))) == 3


def test_an_optimizer_that_was_used_before_brings_its_state():
    model, data = mlp(), regression(6)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for x, y in data[:3]:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    with open_pipe(model, schedule="1f1b", optimizer=optimizer) as pipe:
        list(pipe.train_epoch(data[3:]))
        found = pipe.state_dict()
    for x, y in data[3:]:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    assert all(torch.equal(found[k], v) for k, v in model.state_dict().items())


def test_a_signal_handler_may_close_the_pipeline_in_the_middle_of_a_wait():
    import signal

    before = signal.signal(signal.SIGALRM, lambda *_: pipe.close())
    try:
        with open_pipe() as pipe:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(PipelineClosed):
                list(pipe.train_epoch(regression(1) * 100_000))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_loader_that_draws_random_numbers_is_reproducible_in_process():
    """The stages seed the process's generator for dropout; the loader must not notice."""

    def run():
        torch.manual_seed(11)
        dataset = torch.utils.data.TensorDataset(*batches(1, samples=24)[0])
        loader = torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True)
        with open_pipe(
            kitchen_sink(), loss_fn=F.cross_entropy, optimizer=OPTIMIZERS["sgd"], stages=4
        ) as pipe:
            losses = [r.loss for _ in range(3) for r in pipe.train_epoch(loader)]
        return losses, torch.rand(1).item()

    assert run() == run()


def test_the_callers_model_is_left_alone():
    model = kitchen_sink()
    before = copy.deepcopy(model.state_dict())
    with open_pipe(model, loss_fn=F.cross_entropy) as pipe:
        list(pipe.train_epoch(batches(4)))
        trained = pipe.module()
        assert any(not torch.equal(before[k], v) for k, v in trained.state_dict().items())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert trained is not model


def test_state_dict_has_the_unsplit_models_keys_in_their_order():
    model = nn.Sequential()
    model.add_module("embed", nn.Linear(8, 8))
    model.add_module("norm", nn.BatchNorm1d(8))
    model.add_module("head", nn.Linear(8, 8))
    with open_pipe(model) as pipe:
        state = pipe.state_dict()
        assert list(state) == list(model.state_dict())
        model.load_state_dict(state)


def test_a_list_of_modules_is_a_model():
    with open_pipe([nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)]) as pipe:
        list(pipe.train_epoch(regression(2)))
        assert list(pipe.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
        assert isinstance(pipe.module(), nn.Sequential)


def test_batch_norm_statistics_follow_the_forwards():
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8))
    data = regression(5)
    with open_pipe(model, stages=2) as pipe:
        list(pipe.train_epoch(data))
        state = pipe.state_dict()
    for x, _ in data:
        model[0](x)
    assert state["0.num_batches_tracked"] == 5
    assert torch.equal(state["0.running_mean"], model[0].running_mean)


def test_values_of_every_kind_cross_stages():
    """A dataclass of differentiable, integer, plain and absent members; nested containers."""
    torch.manual_seed(0)
    model = nn.Sequential(MakePair(8), UsePair(8))
    reference, data = copy.deepcopy(model), regression(1)
    with open_pipe(model, stages=2) as pipe:
        result = next(pipe.train_epoch(data))
        state = pipe.state_dict()
    loss = F.mse_loss(reference(data[0][0]), data[0][1])
    assert loss.item() == result.loss
    loss.backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    assert all(torch.equal(state[k], v) for k, v in reference.state_dict().items())


def test_inputs_and_targets_may_be_nested_too():
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, batch):
            return {"out": self.linear(batch["x"]) * batch["scale"], "name": batch["name"]}

    def loss(output, target):
        assert output["name"] == "n"
        return F.mse_loss(output["out"], target[0]) + 0 * target[1].sum()

    data = [({"x": x, "scale": torch.tensor(2.0), "name": "n"}, (y, y)) for x, y in regression(3)]
    with open_pipe(
        nn.Sequential(First(), nn.Identity()), stages=2, loss_fn=loss, micro_batches=2
    ) as pipe:
        assert len(list(pipe.train_epoch(data))) == 3


def test_frozen_layers_at_either_end():
    for frozen in (0, 5):
        model = mlp()
        model[frozen].requires_grad_(False)
        with open_pipe(model, stages=[1, 5]) as pipe:
            list(pipe.train_epoch(regression(4)))
            state = pipe.state_dict()
        assert torch.equal(state[f"{frozen}.weight"], model[frozen].weight)
        assert not torch.equal(state["2.weight"], model[2].weight)


def test_references():
    with open_pipe() as pipe:
        list(pipe.train_epoch(regression(3)))
        pipe.flush()
        state = pipe.state_dict()
        assert torch.equal(pipe.stages[1].rref.local_value()[0].weight.cpu(), state["2.weight"])
        references = pipe.parameter_rrefs()
        assert torch.equal(references[0].to_here().cpu(), state["0.weight"])
        assert references[0].owner_name() == pipe.stages[0].worker
        assert pipe.parameter_rrefs()[0] is references[0]


def test_explain():
    with open_pipe() as pipe:
        lines = pipe.explain().splitlines()
    assert lines[0] == "schedule async-1f1b, 1 micro-batches per update"
    assert lines[1] == "cut between the layers of a sequence"
    assert lines[2].split()[:4] == ["stage", "worker", "layers", "parameters"]
    assert lines[3].split()[:6] == ["0", "stage-0", "0..1", "144", "<=", "3"]


def test_nan_can_be_ignored():
    with open_pipe(
        loss_fn=lambda output, target: (output * float("nan")).mean(), on_nan="ignore"
    ) as p:
        assert all(r.loss != r.loss for r in p.train_epoch(regression(3)))


def test_use_after_close():
    pipe = open_pipe()
    pending = pipe.submit(*regression(1)[0])
    pipe.close()
    pipe.close()
    for use in (
        lambda: pipe.submit(*regression(1)[0]),
        lambda: next(pipe.train_epoch(regression(1))),
        pipe.flush,
        pipe.state_dict,
        pipe.explain,
        lambda: pipe(torch.ones(1, 8)),
        lambda: pipe.evaluate(regression(1)),
        lambda: pipe.stages[0].rref,
        pending.result,
    ):
        with pytest.raises(PipelineClosed, match="the pipeline is closed"):
            use()


def test_a_pipeline_that_is_dropped_ends_its_threads():
    import gc

    pipe = open_pipe()
    del pipe
    gc.collect()
    # The fixture around every test finds what is left.


def test_a_dropped_pipeline_with_a_checkpoint_on_its_way_ends_its_threads(tmp_path):
    """The checkpoint holds steps whose results nobody has seen, and these keep the workers."""
    import gc

    from pipedream_rt import Checkpoints

    pipe = open_pipe(checkpoint=Checkpoints(tmp_path, every=2))
    for x, y in regression(2):
        pipe.submit(x, y)
    assert pipe._run.checkpointer.is_begun
    del pipe
    gc.collect()
    # The fixture around every test finds what is left.
