"""The options of rules, of what a script gives to `Pipeline`."""

import pytest
import torch
from torch import nn

from pipedream_rt import Clip, ConfigError, LossScale, Training
from pipedream_rt.codecs import Int8
from pipedream_rt.corrections import Correction, DelayCompensation, Extrapolation, WeightPrediction
from pipedream_rt.job.codecs import codecs_of
from pipedream_rt.job.given_optimizer import OptimizerParts
from pipedream_rt.job.rules import compiling, correcting, recomputing, rule_options, scale_of
from pipedream_rt.schedules import plan_for
from pipedream_rt.stage.rules.order import ORDER

ADAM = OptimizerParts(torch.optim.Adam, {"lr": 0.1}, [(["0.weight"], {})], {})
PLAN = plan_for("async-1f1b", num_stages=3, per_update=3)


def test_float16_needs_a_scale():
    assert scale_of(Training()) is None
    assert scale_of(Training(autocast=torch.bfloat16)) is None
    assert scale_of(Training(autocast=torch.float16)) == LossScale()
    given = LossScale(init_scale=2.0)
    assert scale_of(Training(autocast=torch.float16, loss_scale=given)) is given


def test_there_is_a_rule_for_each_option_that_is_given_and_no_other():
    none, int8 = codecs_of(None, PLAN), codecs_of(Int8(), PLAN)
    assert rule_options(Training(), (), none) == ()
    every = Training(clip=Clip(norm=1.0), ema=0.9, autocast=torch.float16)
    found = rule_options(every, (Extrapolation(),), int8)
    assert {type(each) for each in found} == set(ORDER)


def test_corrections_are_chosen_for_the_optimizer_and_the_staleness():
    chosen = correcting("auto", PLAN, ADAM)
    assert chosen
    assert list(map(repr, correcting(None, PLAN, ADAM))) == list(map(repr, chosen))
    assert correcting((), PLAN, ADAM) == ()
    assert correcting("auto", plan_for("1f1b", num_stages=3), ADAM) == ()
    assert correcting("auto", PLAN, None) == ()
    given = (DelayCompensation(),)
    assert correcting(list(given), PLAN, ADAM) == given


@pytest.mark.parametrize("wrong", ["fast", DelayCompensation(), 3, ["x"]])
def test_what_is_no_list_of_corrections_is_refused(wrong):
    with pytest.raises(ConfigError, match="Correction objects"):
        correcting(wrong, PLAN, ADAM)


def test_a_correction_that_would_do_nothing_or_does_not_fit_is_refused():
    adagrad = OptimizerParts(torch.optim.Adagrad, {"lr": 0.1}, [(["0.weight"], {})], {})
    with pytest.raises(ConfigError, match="none of the hooks"):
        correcting([Correction()], PLAN, ADAM)
    with pytest.raises(ConfigError, match="WeightPrediction has no rule for Adagrad"):
        correcting([WeightPrediction()], PLAN, adagrad)


def test_stages_that_recompute():
    assert recomputing(False, 3) == frozenset()
    assert recomputing(True, 3) == {0, 1, 2}
    assert recomputing([2, 0], 3) == {0, 2}
    for wrong in (3, [3], [True], "1", [-1]):
        with pytest.raises(ConfigError, match="recompute must be True, False or a list"):
            recomputing(wrong, 3)


def test_layers_are_compiled_as_they_are_given():
    layers = [nn.Linear(2, 2)]
    assert compiling(False, layers) is None
    assert compiling(True, layers) == {}
    assert compiling({"mode": "default"}, layers) == {"mode": "default"}
    layers[0]._compiled_call_impl = print  # as Module.compile sets it
    with pytest.raises(ConfigError, match=r"Linear was compiled in place"):
        compiling(False, layers)
