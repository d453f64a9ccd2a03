"""The weights of a stage by owner: its own, and those that it borrows from other stages."""

import dataclasses

import pytest
import torch
from support.rules import context
from torch import nn

from pipedream_rt.schedules import plan_for
from pipedream_rt.schedules.placement import Tie
from pipedream_rt.stage.weights import entered


def plan(k=1, **options):
    made = plan_for("async-1f1b", num_stages=3, per_update=k, **options)
    return dataclasses.replace(made, ties=(Tie("head", (0, 2)),))


def weights_at(stage, k=1):
    """The weights of a stage with one of its own, called ``own``, and the tied one."""
    module = nn.ParameterDict({n: nn.Parameter(torch.ones(2)) for n in ("tied", "own")})
    names = {"tied": "head", "own": f"{stage}.weight"}
    return context(module, plan(k), stage, names=names).weights, module


def test_who_owns_a_weight_is_the_first_stage_that_uses_it():
    first, _ = weights_at(0)
    last, _ = weights_at(2)
    assert [(owner, [*each.named]) for owner, each in first.by_owner] == [(0, ["0.weight", "head"])]
    assert [(owner, [*each.named]) for owner, each in last.by_owner] == [
        (2, ["2.weight"]),
        (0, ["head"]),
    ]
    assert first.tied == last.tied == ["head"]
    assert last.holder("head") is last.borrowed[0]
    assert last.holder("2.weight") is last.own


def test_without_names_they_are_those_of_the_module():
    weights = context(nn.Linear(1, 1), plan(), 1).weights
    assert weights.names == {"weight": "weight", "bias": "bias"}
    assert weights.tied == []
    assert not weights.borrowed


def test_a_borrowed_weight_is_read_in_the_version_of_its_owner():
    weights, module = weights_at(2)
    made = plan()
    seen = []
    for m in range(6):
        if m > 2:  # the owner sends each version when it has made it
            weights.receive(0, {"head": torch.full((2,), float(m))})
        weights.begin(m)
        assert weights.borrowed[0].ledger.pinned(m) == made.reads(0, m)
        with weights.reading(m):
            seen.append(module["tied"][0].item())
        with weights.own.making([None], weights.next_read(m)):
            pass
        assert weights.end(m) == made.reads(2, m) == m
    assert seen == [1, 1, 1, 3, 4, 5]
    assert weights.borrowed[0].named["head"].tolist() == [5, 5]


def test_what_the_module_had_is_there_after_a_reading_of_all_owners():
    weights, module = weights_at(2)
    before = dict(module.named_parameters())
    weights.begin(0)
    with weights.reading(0):
        assert all(p is not before[n] for n, p in module.named_parameters())
        assert {id(p) for p in module.parameters()} == {id(t) for t in weights.leaves(0)}
    assert all(p is before[n] for n, p in module.named_parameters())


def test_the_gradients_of_borrowed_weights_go_to_their_owner_as_they_are():
    weights, module = weights_at(2)
    weights.begin(0)

    def doubles(gradients, then, now):
        for gradient in gradients.values():
            gradient.mul_(2)

    with weights.accumulating(0, doubles):
        (module["tied"] * 3 + module["own"] * 5).sum().backward()
    assert weights.own.take_gradient("2.weight").tolist() == [10, 10]
    assert weights.borrowed[0].take_gradient("head").tolist() == [3, 3]


@pytest.mark.parametrize(("k", "version"), [(1, 1), (2, 0)])
def test_the_next_micro_batch_and_the_version_that_it_reads(k, version):
    weights, _ = weights_at(0, k)
    assert (weights.next_forward, weights.next_read(0)) == (0, 0)
    for m in range(3):
        weights.begin(m)
        assert weights.next_forward == m + 1
    assert weights.next_read(0) == version


def test_a_replica_reads_every_second_micro_batch():
    made = plan_for("async-1f1b", num_stages=2, replicas=[2, 1], per_update=2)
    weights = [context(nn.Linear(1, 1), made, 0, address).weights for address in (0, 1)]
    assert [each.next_forward for each in weights] == [0, 1]
    weights[1].begin(1)
    assert weights[1].next_forward == 3


def test_contexts_are_left_in_reverse_also_after_an_error():
    events = []

    class Noted:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            events.append(f"+{self.name}")

        def __exit__(self, *error):
            events.append(f"-{self.name}")

    def fails():
        with entered(map(Noted, "ab")):
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert events == ["+a", "+b", "-b", "-a"]
