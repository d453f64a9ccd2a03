"""The table of what does not go together: each row holds for its two features."""

import dataclasses

import pytest
import torch
from torch import nn

from pipedream_rt import Clip, ConfigError, LossScale, Training
from pipedream_rt.corrections import DelayCompensation, Extrapolation
from pipedream_rt.job.conflicts import (
    CONFLICTS,
    Facts,
    ModelFacts,
    facts_of_model,
    may_replicate,
    refuse_conflicts,
)
from pipedream_rt.schedules import plan_for


def plan(schedule, **options):
    return {"plan": plan_for(schedule, num_stages=2, **options)}


def of_model(**names):
    return {"model": ModelFacts(**names)}


FLUSHES, ASYNC, LATE = plan("1f1b"), plan("async-1f1b"), plan("2bw", per_update=2)
REPLICAS = plan("async-1f1b", per_update=2, replicas=(2, 1))
FLUSHED_REPLICAS = plan("1f1b", per_update=2, replicas=(2, 1))
SHARDS = plan("1f1b", per_update=2, replicas=(2, 1), shard_optimizer=True)
HALVES = {**plan("zero-bubble", per_update=2), "proved": True}
IN_SCRIPT = {"plan": dataclasses.replace(FLUSHES["plan"], loss_in_script=True)}
DELAYED = {"corrections": (DelayCompensation(),)}
NORM = {"training": Training(clip=Clip(norm=1.0))}
WHOLE = {"training": Training(loss="whole")}
SCALED = {"training": Training(loss_scale=LossScale())}

CASES = [
    {**SCALED, **ASYNC},
    {**SCALED, **FLUSHES, **of_model(half="0.weight")},
    {**SCALED, **FLUSHES, "feeds_back": True},
    {**REPLICAS, **of_model(tied="0.weight")},
    {**FLUSHED_REPLICAS, **of_model(hooked="0.weight", sum_hooked="0.weight")},
    {**FLUSHED_REPLICAS, **of_model(sparse="0")},
    {**FLUSHED_REPLICAS, **of_model(renormed="0", renormed_replicated="0")},
    {**REPLICAS, **DELAYED},
    {**REPLICAS, **NORM},
    {**SCALED, **plan("1f1b", per_update=2, replicas=(3, 1))},
    {**SHARDS, **NORM},
    {**SHARDS, "training": Training(ema=0.9)},
    {**SHARDS, "corrections": (Extrapolation(),)},
    {**DELAYED, **SCALED, **LATE},
    {**DELAYED, **NORM, **LATE},
    {**DELAYED, **plan("1f1b", per_update=2), **of_model(hooked="w", sum_hooked="w")},
    {**HALVES, "training": Training(recompute=True)},
    {**HALVES, **of_model(hooked="0.weight")},
    {**FLUSHES, **of_model(tied="w", tied_hooked="w", hooked="w")},
    {**IN_SCRIPT, **SCALED},
    {**IN_SCRIPT, "training": Training(weigh=len)},
    {**IN_SCRIPT, **WHOLE},
    {**plan("gpipe", per_update=2), "training": Training(loss="whole", weigh=len)},
    {**plan("1f1b", per_update=2), **WHOLE, "proved": True},
    {**ASYNC, **of_model(renormed="0")},
]


@pytest.mark.parametrize(("row", "case"), [*zip(CONFLICTS, CASES, strict=True)])
def test_a_row_says_why_not_and_what_to_do(row, case):
    facts = Facts(**case)
    assert row.holds(facts)
    with pytest.raises(ConfigError) as e:
        refuse_conflicts(facts)
    why, instead = str(e.value).split("\n")
    assert instead == row.instead
    assert why.endswith(";")
    assert "{" not in why


def test_nothing_is_refused_where_there_is_nothing():
    refuse_conflicts(Facts(**FLUSHES))
    training = Training(clip=Clip(norm=1.0), ema=0.9)
    refuse_conflicts(Facts(**FLUSHES, **DELAYED, training=training))
    refuse_conflicts(Facts(**REPLICAS, corrections=(Extrapolation(),), training=Training(ema=0.9)))


def test_an_order_that_is_not_proved_is_not_walked():
    refuse_conflicts(Facts(**{**HALVES, "proved": False}, **of_model(hooked="0.weight")))


def test_what_may_have_replicas_is_what_no_row_speaks_against():
    assert may_replicate(Facts(**REPLICAS))
    assert may_replicate(Facts(**FLUSHED_REPLICAS, **NORM))
    assert not may_replicate(Facts(**REPLICAS, **NORM))
    for name in ("tied", "sum_hooked", "sparse", "renormed_replicated"):
        assert not may_replicate(Facts(**FLUSHED_REPLICAS, **of_model(**{name: "0.weight"})))


def test_what_a_model_says():
    layers = {"0": nn.Embedding(4, 2, sparse=True), "1": nn.Linear(2, 2), "2": nn.Linear(2, 2)}
    layers["2"].weight = layers["1"].weight
    whole = nn.ModuleDict(layers)

    def facts(**more):
        return facts_of_model(layers, dict(whole.named_parameters(remove_duplicate=False)), **more)

    assert dataclasses.replace(facts(), tied="", sparse="") == ModelFacts()
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
