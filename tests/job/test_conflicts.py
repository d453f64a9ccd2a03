"""The table of what does not go together: each row holds for its two features."""

import dataclasses

import pytest
import torch
from torch import nn

from pipedream_rt import Clip, ConfigError
from pipedream_rt.corrections import DelayCompensation, Extrapolation
from pipedream_rt.job.conflicts import (
    CONFLICTS,
    Facts,
    facts_of_model,
    may_replicate,
    refuse_conflicts,
)

FLUSHES = {"schedule": "1f1b", "flushes": True, "reads_late": True}
ASYNC = {"schedule": "async-1f1b"}
LATE = {"schedule": "2bw", "reads_late": True}
REPLICAS = {"replicas": 2, "per_update": 2}
SHARDS = {"shards": True, **REPLICAS, **FLUSHES}
HALVES = {"cuts_backward": True, **FLUSHES, "schedule": "zero-bubble"}
DELAYED = {"corrections": (DelayCompensation(),)}
NORM = {"clip": Clip(norm=1.0), "num_stages": 2}

CASES = [
    ({"scaled": True}, ASYNC),
    ({"scaled": True}, {"half": "0.weight", **FLUSHES}),
    ({"feeds_back": True}, {"scaled": True, **FLUSHES}),
    ({"tied": "0.weight"}, REPLICAS),
    ({"hooked": "0.weight", "sum_hooked": "0.weight"}, {**REPLICAS, **FLUSHES}),
    ({"sparse": "0"}, {**REPLICAS, **FLUSHES}),
    ({"renormed": "0", "renormed_replicated": "0"}, {**REPLICAS, **FLUSHES}),
    (DELAYED, REPLICAS),
    (NORM, REPLICAS),
    ({"scaled": True, **FLUSHES}, {"replicas": 3, "per_update": 2, **FLUSHES}),
    (NORM, SHARDS),
    ({"averages": True}, SHARDS),
    ({"corrections": (Extrapolation(),)}, SHARDS),
    (DELAYED, {"scaled": True, **LATE}),
    (DELAYED, {**NORM, **LATE}),
    ({**DELAYED, "per_update": 2, **FLUSHES}, {"hooked": "w", "sum_hooked": "w", **FLUSHES}),
    ({"recomputes": True}, HALVES),
    ({"hooked": "0.weight"}, HALVES),
    ({"tied": "w"}, {"tied_hooked": "w", "hooked": "w", **FLUSHES}),
    ({"renormed": "0"}, ASYNC),
]


@pytest.mark.parametrize("number", range(len(CONFLICTS)))
def test_a_row_says_why_not_and_what_to_do(number):
    row, case = CONFLICTS[number], CASES[number]
    facts = Facts(**{**case[0], **case[1]})
    assert row.holds(facts)
    with pytest.raises(ConfigError) as e:
        refuse_conflicts(facts)
    why, instead = str(e.value).split("\n")
    assert instead == row.instead
    assert why.endswith(";")
    assert "{" not in why


def test_each_row_has_a_case():
    assert len(CASES) == len(CONFLICTS)


def test_nothing_is_refused_where_there_is_nothing():
    refuse_conflicts(Facts())
    refuse_conflicts(Facts(**FLUSHES, **NORM, corrections=(DelayCompensation(),), averages=True))
    refuse_conflicts(Facts(**REPLICAS, corrections=(Extrapolation(),), averages=True))


def test_what_may_have_replicas_is_what_no_row_speaks_against():
    assert may_replicate(Facts(**ASYNC, num_stages=2))
    assert may_replicate(Facts(**FLUSHES, **NORM))
    assert not may_replicate(Facts(**ASYNC, **NORM))
    for name in ("tied", "sum_hooked", "sparse", "renormed_replicated"):
        assert not may_replicate(Facts(**FLUSHES, **{name: "0.weight"}))


def test_what_a_model_says():
    layers = {"0": nn.Embedding(4, 2, sparse=True), "1": nn.Linear(2, 2), "2": nn.Linear(2, 2)}
    layers["2"].weight = layers["1"].weight
    whole = nn.ModuleDict(layers)

    def facts(**more):
        return facts_of_model(layers, dict(whole.named_parameters(remove_duplicate=False)), **more)

    assert dataclasses.replace(facts(), tied="", sparse="") == Facts()
    assert facts().sparse == "0"
    assert facts().tied == "1.weight"
    assert facts(tied=()).tied == ""
    layers["1"].weight.register_hook(lambda gradient: gradient)
    layers["1"].bias.register_post_accumulate_grad_hook(lambda parameter: None)
    layers["0"].max_norm = 1.0
    found = facts(tied=["1.weight"])
    assert (found.hooked, found.tied_hooked) == ("1.weight", "1.weight")
    assert (found.sum_hooked, found.renormed) == ("1.bias", "0")
    assert not found.half
    whole.to(torch.float16)
    assert facts().half == "0.weight"
