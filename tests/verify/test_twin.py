"""Copies of the stages in this process."""

import pytest
import torch
from support.verified import BATCH, job_of, linear
from torch import nn

from pipedream_rt import Training
from pipedream_rt.job.options import Layout
from pipedream_rt.verify.compare import Place
from pipedream_rt.verify.plain import copies_of
from pipedream_rt.verify.twin import Twin, names_by_stage


class Repeated(nn.Module):
    """Calls each of its layers once for each column."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, x):
        return torch.cat([self.two(self.one(column)) for column in x.split(1, dim=1)], 1)


class Doubling(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad *= 2
        return super().step(closure)


def seen_by(job, stepped=()):
    with Twin(job, copies_of(job, None), BATCH) as twin:
        seen = twin.step(0, BATCH, [{}], set(stepped))
        return seen, dict(twin.gradients), {n: v.clone() for n, v in twin.state().items()}


def test_calls_of_a_layer_on_several_stages_have_the_names_of_the_forward():
    seen, _, _ = seen_by(job_of(Repeated(), example=BATCH.args[0]))
    outputs = [place.name for place in seen if place[1:3] == (0, "output")]
    calls = ["", "#2", "#3", "#4"]
    assert outputs == [name + call for call in calls for name in ("one", "two")]
    # What goes in is what the micro-batch has in the column of the call.
    for number, call in enumerate(calls):
        given = seen[Place(0, 1, "input", f"one{call}")]
        assert torch.equal(given, BATCH.args[0][2:, number : number + 1])


def test_gradients_are_those_before_the_step_and_some_are_kept():
    model, found = linear(), {}
    for optimizer in (torch.optim.SGD, Doubling):
        job = job_of(model, optimizer=(optimizer, {"lr": 0.1}))
        found[optimizer] = seen_by(job, ["0.weight"])
    (seen, kept, state), (doubled, _, other) = found.values()
    place = Place(0, -1, "gradient", "0.weight")
    assert torch.equal(seen[place], doubled[place])
    assert list(kept) == ["0.weight"]
    assert torch.equal(kept["0.weight"], seen[place])
    before = model[0].weight
    one, two = state["0.weight"] - before, other["0.weight"] - before
    assert torch.allclose(2 * one, two, atol=1e-7)
    assert torch.equal(seen[Place(0, -1, "state", "0.weight")], state["0.weight"])


@pytest.mark.parametrize(
    ("options", "left_out"),
    [
        ({}, ""),
        ({"layout": Layout(replicas=2)}, "replicas"),
        ({"schedule": "async-1f1b"}, "the schedule, async-1f1b"),
        ({"training": Training(ema=0.9)}, "the average of weights"),
    ],
)
def test_what_plain_pytorch_has_not_is_left_out(options, left_out):
    job = job_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), **options)
    with Twin(job, copies_of(job, None), BATCH) as twin:
        assert left_out in " ".join(twin.left_out)
        assert bool(twin.left_out) == bool(left_out)


def test_a_parameter_is_of_the_stage_that_steps_it():
    layer = nn.Linear(4, 4)
    job = job_of(nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 4), layer))
    first, last = names_by_stage(job)
    assert {"0.weight", "0.bias"} <= {*first}
    assert {"2.weight", "2.bias"} <= {*first, *last}
    assert not {*first} & {*last}
