"""The face of the pipeline, in one thread."""

import copy
import functools
from pathlib import Path

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

import pipedream_rt as unpinned
from pipedream_rt import Along, Checkpoints, ConfigError, Layout, Observe, PipelineClosed
from pipedream_rt.observers import CSV, JSONLines
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


class Twins(nn.Module):
    """Two inputs through the same layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.out = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), nn.Linear(8, 1)

    def tower(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x

    def forward(self, first, second):
        return self.out(torch.cat([self.tower(first), self.tower(second)], 1))


def triples(count):
    """Triples of two inputs and the target."""
    torch.manual_seed(1)
    return [(torch.randn(8, 4), torch.randn(8, 4), torch.randn(8, 1)) for _ in range(count)]


def test_a_prepare_that_is_given_once_holds_for_all_that_reads_items():
    def prepare(item):
        return (item["pair"][0], item["pair"][1]), {}, item["y"]

    dicts = [{"pair": (a, b), "y": y} for a, b, y in triples(4)]
    with (
        open_pipe(Twins(), example=iter_twice(dicts), prepare=prepare) as pipe,
        open_pipe(Twins(), example=triples(1)[0]) as plain,
    ):
        assert [r.loss for r in pipe.train_epoch(dicts)] == [
            r.loss for r in plain.train_epoch(triples(4))
        ]
        assert pipe.submit(dicts[0]).result().loss == plain.submit(*triples(1)[0]).result().loss
        assert pipe.evaluate(dicts) == plain.evaluate(triples(4))
        for one, other in zip(pipe.predict(dicts), plain.predict(triples(4)), strict=True):
            assert torch.equal(one, other)
        assert pipe.verify(dicts, steps=1)
        own = {"prepare": lambda item: ((item[1], item[0]), {}, item[2])}
        turned = [(b, a, y) for a, b, y in triples(2)]
        assert pipe.evaluate(turned, **own) == plain.evaluate(triples(2))


def test_outputs_prepares_items_and_hands_out_those_of_the_loader():
    def prepare(item):
        return item["x"], {}, None

    data = [{"x": (a, b), "y": y} for a, b, y in triples(2)]
    with open_pipe(Twins(), loss_fn=None, example=data[0], prepare=prepare) as pipe:
        for output, item in pipe.outputs(data):
            F.mse_loss(output, item["y"]).backward()
        assert pipe.step == 2


def test_an_example_may_be_marked(caplog):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.lstm, self.out = nn.Embedding(9, 4), nn.LSTM(4, 4), nn.Linear(4, 9)

        def forward(self, words):
            return self.out(self.lstm(self.embed(words))[0])

    def loss(output, y):
        return F.cross_entropy(output.flatten(0, 1), y.flatten())

    words = torch.randint(9, (7, 8))
    item = Along(words, dim=1), Along(words, dim=1)
    with open_pipe(Words(), stages=2, example=item, loss_fn=loss, micro_batches=4) as pipe:
        pipe.submit(*item).result()
        assert pipe(words).shape == (7, 8, 9)
    assert "dimension 0" not in caplog.text


def iter_twice(items):
    """A loader of these items that can be looked at."""
    return torch.utils.data.DataLoader(items, batch_size=None)


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

    signal.signal(signal.SIGALRM, lambda *_: pipe.close())
    try:
        with open_pipe() as pipe:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(PipelineClosed):
                list(pipe.train_epoch(regression(1) * 100_000))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


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


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize(
    "options",
    [
        lambda path: {"checkpoint": path},
        lambda path: {"checkpoint": Checkpoints(path, every=1)},
        lambda path: {"layout": Layout(weights=path)},
        lambda path: {"observe": Observe(record=path)},
        lambda path: {"observe": Observe(report=path)},
        lambda path: {"observe": Observe(trace=path)},
        lambda path: {"observe": Observe(to=[CSV(path)])},
        lambda path: {"observe": Observe(to=[JSONLines(path)])},
    ],
    ids=["checkpoint", "Checkpoints", "weights", "record", "report", "trace", "CSV", "JSONLines"],
)
def test_an_address_is_refused_before_anything_starts(tmp_path, monkeypatch, options, kind):
    monkeypatch.chdir(tmp_path)
    for given, words in (("s3://bucket/run", "an address"), ("$NOT_SET/run", "NOT_SET is not set")):
        with pytest.raises(ConfigError, match=words):
            open_pipe(**options(kind(given)))
    assert not [*tmp_path.iterdir()]


def test_paths_begin_at_home_and_have_variables(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NAME", "one")
    data = regression(2)
    observe = Observe(record="~/record", report="~/$NAME.html", trace="~/$NAME.trace")
    kept = Checkpoints("~/${NAME}", every=1)
    with open_pipe(observe=observe, checkpoint=kept) as pipe:
        list(pipe.train_epoch(data))
        assert pipe.save("~/saved").parent == tmp_path / "saved"
        pipe.load("~/saved")
        pipe.keep_best("~/best", 1.0)
        assert pipe.report("~/now.html") == tmp_path / "now.html"
        for call in (pipe.save, pipe.load, pipe.report, lambda path: pipe.keep_best(path, 0.0)):
            with pytest.raises(ConfigError, match="an address"):
                call("gs://bucket/run")
    found = {path.name for path in tmp_path.iterdir()} - {"here"}
    assert found == {"record", "one.html", "one.trace", "one", "saved", "best", "now.html"}
    assert not [*(tmp_path / "here").iterdir()]


def test_what_people_write_instead_is_answered_with_what_to_write():
    with open_pipe() as pipe:
        (x, y), *_ = data = batches(2)
        with pytest.raises(ConfigError, match=r"for result in pipe.train_epoch\(loader\)"):
            pipe.train(data)
        pipe.train(False)
        for given in ((x, y), (x.sum(),), (None,)):
            with pytest.raises(ConfigError, match=r"call pipe.submit\(x, y\).result\(\)"):
                pipe.step(*given)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(x.sum())
        with pytest.raises(ConfigError, match="leave the scaler out"):
            scaler.step(pipe.optimizer)
        with pytest.raises(AttributeError, match=r"Training\(clip=Clip\(1.0\)\)"):
            pipe.clip_grad_norm_(1.0)


def test_stages_that_are_left_out_are_told_of(caplog):
    for options, told in (({}, True), ({"stages": 1}, False)):
        caplog.clear()
        with unpinned.Pipeline(mlp(), workers="serial", **options):
            found = [r for r in caplog.records if "stages= was left out" in r.getMessage()]
            assert [r.levelname for r in found] == ["WARNING"] * told
