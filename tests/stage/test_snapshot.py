"""The state of a stage goes through one set of functions, and comes back as it was."""

import torch
import torch.nn.functional as F
from support.oracle import assert_same
from support.stages import stages_of
from torch import nn

from pipedream_rt import Clip
from pipedream_rt.messages.keys import by_key, by_text
from pipedream_rt.messages.tree import Value, flatten
from pipedream_rt.stage import snapshot

ADAM = (torch.optim.Adam, {"lr": 0.1})
HYPER = [{}]


def model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4))


def one_stage(**options):
    (stage,) = stages_of(model(), loss_fn=F.mse_loss, optimizer=ADAM, **options)
    return stage


def value(x):
    structure, tensors = flatten(x)
    return Value(structure, tuple(tensors), (False,) * len(tensors))


def train(stage, numbers):
    for m in numbers:
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(m))
        stage.forward(m, [value(x)], HYPER, value(x.flip(0)), 1.0)
        stage.backward(m, ())
        stage.end(m)
        stage.step(m)
    return stage


def test_a_stage_goes_on_from_what_was_read_of_another():
    options = {"clip": Clip(norm=0.1), "ema": 0.9}
    whole, begun = train(one_stage(**options), range(6)), train(one_stage(**options), range(3))
    state, steps = snapshot.state_dict(begun), by_text(snapshot.step_state(begun))
    again = one_stage(**options)
    buffers = {n: b.clone() for n, b in begun.module.named_buffers()}
    weights = {n: t.clone() for n, t in state.items()}
    snapshot.restore(again, 3, weights, {}, buffers)
    snapshot.load_step_state(again, by_key(steps), 3)
    train(again, range(3, 6))
    assert_same(snapshot.state_dict(again), snapshot.state_dict(whole))
    found, wanted = by_text(snapshot.step_state(again)), by_text(snapshot.step_state(whole))
    assert found.pop("split/0") == wanted.pop("split/0")
    assert_same(found, wanted)
    assert snapshot.fingerprints(again) == snapshot.fingerprints(whole)


def test_each_value_stands_under_the_part_that_keeps_it():
    stage = train(one_stage(ema=0.9), range(2))
    parts = {key.part for key in snapshot.step_state(stage)}
    assert parts == {"optimizer", "split", "ema"}
    assert {key.part for key in snapshot.optimizer_state(stage)} == {"optimizer", "split", "ema"}


def test_loaded_weights_are_those_of_the_newest_version():
    stage = train(one_stage(), range(2))
    zeros = {key: torch.zeros_like(t) for key, t in snapshot.state_dict(stage).items()}
    snapshot.load_state(stage, zeros)
    assert_same(snapshot.state_dict(stage), zeros)
    train(stage, [2])
    assert any(t.any() for t in snapshot.state_dict(stage).values())


def test_a_kept_version_stays_as_it_was():
    stage = train(one_stage(ema=0.5), range(2))
    before = {key: t.clone() for key, t in snapshot.state_dict(stage).items()}
    snapshot.keep(stage, 1, False, {})
    snapshot.keep(stage, 2, True, {})
    train(stage, [2])
    assert_same(snapshot.state_dict(stage, 1), before)
    average, newest = snapshot.state_dict(stage, 2), snapshot.state_dict(stage)
    assert not torch.equal(average["0.weight"], newest["0.weight"])


def test_fingerprints_differ_where_a_value_does():
    one, other = train(one_stage(), range(2)), train(one_stage(), range(2))
    assert snapshot.fingerprints(one) == snapshot.fingerprints(other)
    with torch.no_grad():
        other.module[1].running_mean[0] += 1
    before, now = snapshot.fingerprints(one), snapshot.fingerprints(other)
    assert [key for key in now if now[key] != before[key]] == ["buffers"]
