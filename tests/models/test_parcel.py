"""A walk through what a stage goes by: what was changed in it, and what messages call it."""

import array
import functools
import os
import random
import sys
import threading
import types
from contextvars import ContextVar, copy_context

import numpy as np
import pytest
import torch
from torch import nn

from pipedream_rt.models.parcel import Parcel, weights_in


class Inner:
    def __init__(self):
        self.beta = 1.0


class WithoutState:
    """Is pickled without what it has meanwhile."""

    def __init__(self):
        self.calls = 0

    def __reduce__(self):
        return WithoutState, ()


class Slots:
    __slots__ = ("beta",)

    def __init__(self):
        self.beta = 1.0


BETA, CONF, BANK = 1.0, Inner(), {"a": [1.0]}
VARIABLE, HERE = ContextVar("beta", default=1.0), threading.local()
HERE.beta = 1.0
MODULE, OTHER = types.ModuleType("own_module"), types.ModuleType("own_other")
MODULE.BETA, MODULE.other, OTHER.BETA = 1.0, OTHER, 1.0


def by_global():
    return BETA


def by_object():
    return CONF.beta


def by_entry():
    return BANK["a"][0]


def by_variable():
    return VARIABLE.get() + HERE.beta


def by_module():
    return MODULE.BETA + MODULE.other.BETA


def by_import():
    import own_module

    return own_module.BETA


def by_environment():
    return os.environ["PARCEL_BETA"]


@functools.lru_cache
def cached():
    return BETA


def by_cached():
    return cached()


class Held:
    """Reads a module that it holds, which no code names."""

    def __init__(self):
        self.module = MODULE

    def __call__(self, output, target):
        return output * self.module.BETA


class Loss:
    scale = 1.0

    def __init__(self):
        self.inner = Inner()

    def __call__(self, output, target):
        return output * self.inner.beta * self.scale + self.helper()

    def helper(self):
        return by_object()


def changed(root, change):
    """Return what messages call what a change has changed."""
    parcel = Parcel([("root", root)])
    assert parcel.changes() == []
    change(root)
    return {parcel.name(place) for place, *_ in parcel.changes()}


def increase_entry(_):
    BANK["a"][0] += 1


@pytest.mark.parametrize(
    ("root", "change", "expected"),
    [
        (by_global, lambda p: p.setitem(globals(), "BETA", 2.0), "'BETA' of the globals"),
        (by_cached, lambda p: p.setitem(globals(), "BETA", 2.0), "'BETA' of the globals"),
        (by_object, lambda p: p.setattr(CONF, "beta", 2.0), "'beta' of 'CONF' of the globals"),
        (Loss(), lambda p: p.setattr(CONF, "beta", 2.0), "'beta' of 'CONF' of the globals"),
        (Loss(), lambda p: p.setattr(Loss, "scale", 2.0), "'scale' of the class Loss"),
        (by_module, lambda p: p.setattr(MODULE, "BETA", 2.0), "'BETA' of the module own_module"),
        (by_module, lambda p: p.setattr(OTHER, "BETA", 2.0), "'BETA' of the module own_other"),
        (by_import, lambda p: p.setattr(MODULE, "BETA", 2.0), "'BETA' of the module own_module"),
        (Held(), lambda p: p.setattr(MODULE, "BETA", 2.0), "'BETA' of the module own_module"),
        (by_variable, lambda p: p.setattr(HERE, "beta", 2.0), "'beta' of 'HERE' of the globals"),
        (by_entry, increase_entry, "0 of 'a' of 'BANK' of the globals"),
        (by_variable, lambda p: VARIABLE.set(2.0), "'VARIABLE' of the globals"),
        (by_environment, lambda p: p.setenv("PARCEL_BETA", "2"), "'PARCEL_BETA' of os.environ"),
        (by_global, lambda p: p.setattr(by_global, "rate", 2.0, False), "'rate' of by_global"),
    ],
)
def test_what_code_names_has_a_place(root, change, expected, monkeypatch):
    monkeypatch.setitem(sys.modules, "own_module", MODULE)
    (found,) = copy_context().run(changed, root, lambda _: change(monkeypatch))
    assert found.startswith(expected)


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (Inner(), lambda it: setattr(it, "beta", 2.0)),
        (Slots(), lambda it: setattr(it, "beta", 2.0)),
        (Inner(), lambda it: setattr(it, "beta", True)),  # of another type, and equal
        ([1, [2]], lambda it: it[1].append(3)),
        ({"a": {1}}, lambda it: it["a"].add(2)),
        (array.array("d", [0.0]), lambda it: it.append(1.0)),
        (torch.zeros(3), lambda it: it.data.fill_(1)),
        (torch.zeros(300, 300).t(), lambda it: it.fill_(1)),
        (np.zeros(3), lambda it: it.fill(1)),
        (torch.Generator(), lambda it: torch.rand(1, generator=it)),
        (np.random.default_rng(0), lambda it: it.normal()),
        (random.Random(0), lambda it: it.random()),
        (functools.partial(max, [1]), lambda it: it.args[0].append(2)),
        (nn.Dropout(0.1), lambda it: setattr(it, "p", 0.2)),
        (nn.Sequential(nn.Dropout(0.1)), lambda it: setattr(it[0], "p", 0.2)),
        (nn.Linear(2, 2), lambda it: it.weight.data.fill_(1)),
        (nn.Linear(2, 2), lambda it: it.register_forward_hook(by_global)),
        (types.SimpleNamespace(beta=1.0), lambda it: setattr(it, "beta", 2.0)),
    ],
)
def test_whatever_kind_of_object_holds_a_value_a_change_shows(value, change):
    assert changed(value, change)


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (WithoutState(), lambda it: setattr(it, "calls", 1)),
        (threading.Lock(), lambda it: it.acquire()),
        ({"a": [1.0]}, lambda it: it.update(a=[1.0])),  # another list with the same in it
        ({"a": float("nan")}, lambda it: it.update(a=float("nan"))),
        (nn.Linear(2, 2), lambda it: it.eval()),
    ],
)
def test_what_is_packed_alike_is_no_change(value, change):
    assert not changed(value, change)


def test_another_name_of_what_is_seen_already_has_a_place_of_its_own():
    one, two = Inner(), Inner()
    found = changed({"one": one, "two": two, "now": one}, lambda it: it.update(now=two))
    assert found == {"'now' of root"}


def test_what_came_later_is_told_of_once_and_not_gone_into():
    value = {}
    parcel = Parcel([("root", value)])
    value["a"] = Inner()
    assert len(parcel.changes()) == 2  # the entry, and the length
    parcel.settle()
    value["a"].beta = 2.0
    assert parcel.changes() == []


def test_weights_of_the_model_are_left_out():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    parcel = Parcel([("layer 0", model)], weights_in([model]))
    with torch.no_grad():
        model[0].weight.fill_(1)
    model[1].running_mean = torch.ones(2)
    assert parcel.changes() == []


def test_of_a_large_container_a_sample_and_the_length_count():
    value = [0.0] * 1_000_000
    assert changed(value, lambda it: it.append(1.0))
    assert len(Parcel([("data", [[0.0] * 5000 for _ in range(5000)])]).marks) < 200_000


class Endless:
    """Each has another one, as nodes of a graph."""

    def __init__(self):
        self.next = None


def test_a_walk_ends_where_objects_refer_to_each_other_without_end():
    one, other = Endless(), Endless()
    one.next, other.next = other, one
    first = one
    for _ in range(100_000):
        first.next = first = Endless()
    assert len(Parcel([("a list", one)]).marks) <= 200_001
