"""The optimizer in the user's script, whose state is on the stages."""

import pytest
import torch
from support.models import OPTIMIZERS, mlp, regression
from support.oracle import assert_same
from support.small import small
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from pipedream_rt import ConfigError, DistributedOptimizer, PipelineError
from pipedream_rt.stage.hyper import pack_hyper


def test_an_optimizer_over_the_model_keeps_its_groups():
    model = mlp()
    matrices, biases = ([p for p in model.parameters() if p.dim() == dim] for dim in (2, 1))
    groups = [
        {"params": matrices, "weight_decay": 0.5}, {"params": biases, "weight_decay": 0, "lr": 0.3}
    ]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    data = regression(4)
    with small(model, schedule="gpipe", optimizer=optimizer) as pipe:
        assert [g["lr"] for g in pipe.optimizer.param_groups] == [0.01, 0.3]
        list(pipe.train_epoch(data))
        state, packed = pipe.state_dict(), pipe.optimizer.state_dict()
    for x, y in data:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    assert_same(state, model.state_dict())
    expected = optimizer.state_dict()
    assert packed["param_groups"] == expected["param_groups"]
    for index, entry in expected["state"].items():
        assert_same(packed["state"][index], entry)


def test_optimizer_state_goes_round_and_training_continues_the_same():
    """Saved after 3 mini-batches and loaded elsewhere: the rest gives the same bits."""
    data = regression(8)
    kwargs = {"optimizer": OPTIMIZERS["adamw"], "schedule": "1f1b"}
    with small(**kwargs) as pipe:
        list(pipe.train_epoch(data[:3]))
        state, packed = pipe.state_dict(), pipe.optimizer.state_dict()
        list(pipe.train_epoch(data[3:]))
        expected = pipe.state_dict()
    with small(stages=2, **kwargs) as pipe:
        pipe.load_state_dict(state)
        pipe.optimizer.load_state_dict(packed)
        list(pipe.train_epoch(data[3:]))
        found = pipe.state_dict()
    assert_same(found, expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.StepLR(o, 2, 0.5),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=10),
        lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [3]
        ),
    ],
)
def test_stock_schedulers_work(make):
    """No warning (warnings are errors here), and the rate reaches param_groups."""
    with small(optimizer=(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})) as pipe:
        scheduler = make(pipe.optimizer)
        rates = set()
        for result in pipe.train_epoch(regression(6)):
            if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                scheduler.step(1.0 + result.step)
            else:
                scheduler.step()
            rates.add(pipe.optimizer.param_groups[0]["lr"])
        assert len(rates) > 1


def test_a_distributed_optimizer_over_the_parameter_references():
    """The constructor of torch's own class; assigning it makes the stages step with it."""
    data = regression(5)
    with small(optimizer=None, schedule="1f1b") as pipe:
        optimizer = DistributedOptimizer(
            torch.optim.SGD, pipe.parameter_rrefs(), lr=0.1, momentum=0.5
        )
        assert isinstance(optimizer, torch.optim.Optimizer)
        with pytest.raises(PipelineError, match=r"assign it to pipe\.optimizer"):
            optimizer.state_dict()
        pipe.optimizer = optimizer
        list(pipe.train_epoch(data))
        assert len(optimizer.remote_optimizers) == 3
        assert isinstance(optimizer.remote_optimizers[0].local_value(), torch.optim.SGD)
        found = pipe.state_dict()
    momentum = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.5})
    with small(optimizer=momentum, schedule="1f1b") as pipe:
        list(pipe.train_epoch(data))
        assert_same(found, pipe.state_dict())


def test_a_parameter_in_an_option_is_refused_as_the_stages_would_get_copies():
    model = mlp()
    with small(model, optimizer=None, schedule="1f1b") as pipe:
        group = {"params": pipe.parameter_rrefs(), "centre": model[0].weight}
        optimizer = DistributedOptimizer(torch.optim.SGD, [group], lr=0.1)
        with pytest.raises(ConfigError, match=r"the parameter 0\.weight in an option"):
            pipe.optimizer = optimizer
        with pytest.raises(ConfigError, match="made without an optimizer"):
            assert pipe.optimizer


def test_what_cannot_be_loaded_ends_nothing():
    with small() as pipe:
        with pytest.raises(ConfigError):
            pipe.optimizer.load_state_dict(pipe.optimizer.state_dict() | {"state": {0: {"x": {1}}}})
        assert len(list(pipe.train_epoch(regression(2)))) == 2


# -- without a pipeline ---------------------------------------------------------------------------


class Link:
    """A pipeline whose stages keep the state of an optimizer."""

    def __init__(self):
        self.state = {}

    def optimizer_references(self):
        return []

    def drop_gradients(self):
        pass

    def gather_optimizer_state(self):
        return self.state

    def scatter_optimizer_state(self, state):
        self.state = state


REFERENCES = ["a", "b", "c"]


def attached(*groups, **options):
    """An optimizer of a pipeline; a reference is the name of its parameter here."""
    optimizer = DistributedOptimizer(torch.optim.SGD, list(groups) or REFERENCES, **options)
    link = Link()
    optimizer.attach(link, optimizer.spec(lambda name: name))
    return optimizer, link


def test_what_the_script_changes_travels_from_then_on_and_nothing_else():
    optimizer, _ = attached({"params": ["a"]}, {"params": ["b", "c"], "lr": 0.3}, lr=0.1)
    assert optimizer.hyper() == [{}, {}]
    optimizer.param_groups[1]["lr"] = 0.5
    assert optimizer.hyper() == [{}, {"lr": pack_hyper(0.5, "lr")}]
    optimizer.param_groups[1]["lr"] = 0.3  # a stage may have another value by now
    assert optimizer.hyper() == [{}, {"lr": pack_hyper(0.3, "lr")}]
    optimizer.begin_anew()
    assert optimizer.hyper() == [{}, {}]
    assert optimizer.names() == [["a"], ["b", "c"]]


def test_what_differs_from_other_groups_is_sent_as_if_it_had_been_changed():
    optimizer, _ = attached(lr=0.1)
    (saved,) = optimizer.groups()
    optimizer.insist([saved])
    assert optimizer.hyper() == [{}]
    optimizer.insist([{**saved, "lr": pack_hyper(0.7, "lr")}])
    assert optimizer.hyper() == [{"lr": pack_hyper(0.1, "lr")}]


def test_a_state_dict_goes_round_by_the_numbers_of_the_parameters():
    one, link = attached({"params": ["a"]}, {"params": ["b", "c"], "lr": 0.3}, lr=0.1)
    whole = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))]},
                             {"params": [nn.Parameter(torch.ones(1)) for _ in range(2)]}],
                            lr=0.2, momentum=0.9)  # fmt: skip
    given = whole.state_dict() | {"state": {2: {"momentum_buffer": torch.full((1,), 5.0)}}}
    shared = one.param_groups[0]
    one.load_state_dict(given)
    assert shared is one.param_groups[0]  # an optimizer that shares the groups sees new values
    assert [group["lr"] for group in one.param_groups] == [0.2, 0.2]
    assert one.hyper() == [{}, {}]  # the stages have got them
    found = {str(key): value for key, value in link.state.items()}
    assert found["optimizer/c/momentum_buffer"].item() == 5.0
    back = one.state_dict()
    assert list(back["state"]) == [2]
    assert [group["params"] for group in back["param_groups"]] == [[0], [1, 2]]
    assert back["param_groups"][1]["momentum"] == 0.9


@pytest.mark.parametrize(
    ("given", "words"),
    [(3, "not 3"), ({"w": 1}, r"not one with \['w'\]"), ([], r"not \[\]")],
    ids=["number", "weights", "list"],
)
def test_what_is_no_state_dict_is_refused(given, words):
    optimizer, link = attached(lr=0.1)
    with pytest.raises(ConfigError, match=f"a dict with 'state' and 'param_groups', {words}"):
        optimizer.load_state_dict(given)
    assert link.state == {}


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda o: o.step(), "every stage steps by itself once a mini-batch is through"),
        (lambda o: o.add_param_group({"params": ["d"]}), "no group can be added"),
        (lambda o: o.register_step_pre_hook(print), "would be called in the script"),
        (lambda o: o.register_step_post_hook(print), "would be called in the script"),
        (lambda o: o.state, "the state of pipe.optimizer is on the stages"),
        (lambda o: o.param_groups[0]["params"][0].grad, "have no gradients to clip"),
    ],
    ids=["step", "add_param_group", "pre hook", "post hook", "state", "gradient"],
)
def test_what_a_script_cannot_do_with_it_is_refused(use, words):
    optimizer, _ = attached(lr=0.1)
    with pytest.raises(ConfigError, match=words):
        use(optimizer)
    optimizer.count_step()
    optimizer.zero_grad()
    assert optimizer.hyper() == [{}]


def test_one_that_no_pipeline_uses_has_no_state():
    optimizer = DistributedOptimizer(torch.optim.SGD, REFERENCES, lr=0.1)
    for use in (optimizer.state_dict, optimizer.names, lambda: optimizer.remote_optimizers):
        with pytest.raises(PipelineError, match="no pipeline uses this optimizer"):
            use()
    with pytest.raises(ConfigError, match="the optimizer got no parameters"):
        DistributedOptimizer(torch.optim.SGD, [], lr=0.1)
