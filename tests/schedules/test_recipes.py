"""The built-in schedules: their names and the help about them."""

import math
from typing import get_args

import pytest

from pipedream_rt.schedules import RECIPES, describe_schedules, plan_for
from pipedream_rt.schedules.recipes import ScheduleName


def test_help_has_a_line_for_each_schedule():
    text = describe_schedules()
    for name, recipe in RECIPES.items():
        assert sum(line.split()[0] == name for line in text.splitlines()) == 1
        assert recipe.bubble_text in text
    for word in ("versions kept", "bubble", "staleness"):
        assert all(word in line for line in text.splitlines()[: len(RECIPES)])


def test_every_schedule_has_a_name_that_type_checkers_know():
    assert set(get_args(ScheduleName)) == {*RECIPES}


@pytest.mark.parametrize("name", RECIPES)
def test_the_formulas_of_the_help_are_what_a_plan_says(name):
    """With ceil(w/k) and so on computed as they are written there."""
    recipe, n, k = RECIPES[name], 4, 5 if name != "interleaved-1f1b" else 4
    plan = plan_for(name, num_stages=n * recipe.stages_per_worker, per_update=k)

    def value(text, stage):
        w = plan.shape.warm_up
        names = {"ceil": math.ceil, "k": k, "n": n}
        text = text.removeprefix("up to ").replace("w(0)", str(w(0)))
        return eval(text, names, {"w": w(stage)})

    for stage in range(plan.num_stages):
        assert plan.kept(stage) == value(recipe.kept_text, stage)
        assert plan.staleness(stage) == value(recipe.staleness_text, stage)
    assert plan.flushes is (recipe.bubble_text != "0")
