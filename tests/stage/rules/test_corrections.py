"""Corrections on a stage: when their hooks are called, what they may change, and what is kept."""

import copy
import dataclasses

import pytest
import torch
from support.oracle import assert_same
from support.rules import context
from torch import nn

from pipedream_rt.corrections import Correction
from pipedream_rt.errors import ConfigError
from pipedream_rt.messages.state_keys import StateKey, by_text
from pipedream_rt.schedules import plan_for
from pipedream_rt.schedules.placement import Tie
from pipedream_rt.stage.rules.corrections import Correcting
from pipedream_rt.stage.rules.rule import Update

ASYNC = plan_for("async-1f1b", num_stages=3)


class Corrected:
    """Stage 0 of three with two weights, 1 and 2, one of which may be tied, and corrections.

    Attributes:
        rule: The rule of the corrections.
    """

    def __init__(self, *corrections, plan=ASYNC, optimizer=torch.optim.SGD, lr=0.5, **options):
        self.plan = plan
        self.module = nn.ParameterDict({n: nn.Parameter(torch.ones(2)) for n in ("w", "v")})
        given = context(self.module, plan)
        self.own = given.weights.own
        self.rule = Correcting(corrections).rule(given)
        self.optimizer = optimizer(self.module.values(), lr=lr, **options)

    @property
    def group(self):
        return self.optimizer.param_groups[0]

    def step(self, number, read=None):
        """Make an update, with gradients of 1."""
        update = Update(number, [], [], [number if read is None else read])
        gradients = [torch.ones(2)] * 2
        with (
            self.own.making(gradients, self.plan.reads(0, number + 3)),
            self.rule.around(update, self.optimizer),
        ):
            self.optimizer.step()
        self.rule.after(update, self.optimizer)
        return self


class Notes(Correction):
    """Notes for each hook the moment, and the names and numbers that it was given."""

    def __init__(self):
        self.notes = []

    def _note(self, hook, at, *named):
        given = [{name: t[0].item() for name, t in each.items()} for each in named]
        self.notes.append((hook, at.update, at.read, *given))

    def before_forward(self, at, weights, optimizer):
        self._note("before_forward", at, weights)

    def after_backward(self, at, gradients, read, newest):
        self._note("after_backward", at, gradients, read, newest)

    def before_step(self, at, optimizer):
        self._note("before_step", at)

    def after_step(self, at, weights, before):
        self._note("after_step", at, weights, before)


# -- hooks --------------------------------------------------------------------------------------


def test_the_hooks_of_a_step_come_around_it_and_views_after_it():
    correction = Notes()
    Corrected(correction).step(0, read=-1.5)
    assert correction.notes == [
        ("before_step", 0, -1.5),
        ("after_step", 0, -1.5, {"v": 0.5, "w": 0.5}, {"v": 1.0, "w": 1.0}),
        ("before_forward", 3, 1, {"v": 0.5, "w": 0.5}),
    ]


def test_a_gradient_is_corrected_where_it_is_stale():
    correction = Notes()
    made = Corrected(correction)
    for m in range(2):
        made.own.begin(m, 0, m)
    assert made.rule.adjust(0) is None
    weights = {name: torch.full((2,), 3.0) for name in ("v", "w")}
    made.rule.adjust(1)({"w": torch.ones(2)}, weights, weights)
    both = {"v": 3.0, "w": 3.0}
    assert correction.notes == [("after_backward", 1, 0, {"w": 1.0}, both, both)]


def test_a_hook_that_nobody_has_costs_nothing():
    class Damps(Correction):
        def before_step(self, at, optimizer):
            pass

    made = Corrected(Damps())
    made.own.begin(1, 0, 1)
    assert made.rule.adjust(1) is None
    made.step(0)
    assert made.rule.views() == {}
    assert made.own.allocated == 2


def test_tied_weights_are_left_out_of_what_micro_batches_read():
    correction = Notes()
    plan = dataclasses.replace(ASYNC, ties=(Tie("w", (0, 2)),))
    made = Corrected(correction, plan=plan)
    assert correction.parameters.keys() == {"v"}
    made.own.begin(1, 0, 1)
    made.rule.adjust(1)({name: torch.ones(2) for name in ("v", "w")}, {}, {})
    made.own.end(1)
    made.step(0)
    hooks = {hook: given for hook, _, _, *given in correction.notes}
    assert hooks["after_backward"][0].keys() == hooks["before_forward"][0].keys() == {"v"}
    assert hooks["after_step"][0].keys() == {"v", "w"}


def test_the_hook_that_fails_is_named_until_one_goes_well():
    class Fails(Correction):
        wrong = True

        def after_step(self, at, weights, before):
            if self.wrong:
                raise ZeroDivisionError

    correction = Fails()
    made = Corrected(correction)
    with pytest.raises(ZeroDivisionError):
        made.step(0)
    assert made.rule.at == "Fails.after_step"


# -- options ------------------------------------------------------------------------------------


class InPlace(Correction):
    """Changes a rate that is a tensor in place, and adds an option."""

    def before_step(self, at, optimizer):
        for group in optimizer.param_groups:
            group["lr"] /= 1 + at.staleness
            group["boost"] = group.get("boost", 1) * 2


@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
def test_options_are_changed_for_one_step_alone(rate):
    made = Corrected(InPlace(), lr=rate)
    before = dict(made.group)
    for number in range(3):
        made.step(number, read=number - 1)
    assert made.group.keys() == before.keys()
    assert all(made.group[name] is value for name, value in before.items())
    assert made.group["lr"] == 0.5
    assert made.module["w"].tolist() == [0.25, 0.25]


def test_a_view_is_made_with_the_options_that_the_step_had():
    class Looks(InPlace):
        def before_forward(self, at, weights, optimizer):
            self.seen = optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["boost"]

    correction = Looks()
    made = Corrected(correction).step(0, read=-1)
    assert correction.seen == (0.25, 2)
    assert made.group["lr"] == 0.5
    assert "boost" not in made.group


class Decaying(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["lr"] = group["lr"] * 0.9


def test_an_option_that_the_step_changes_too_is_refused():
    with pytest.raises(ConfigError, match="the step of the optimizer changes its option 'lr'"):
        Corrected(InPlace(), optimizer=Decaying).step(0, read=-1)


@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
def test_an_option_that_the_step_alone_changes_is_as_the_step_has_left_it(rate):
    made = Corrected(Notes(), optimizer=Decaying, lr=rate).step(0)
    assert float(made.group["lr"]) == pytest.approx(0.45)


def test_a_step_that_fails_leaves_the_options_as_they_were():
    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            raise ZeroDivisionError

    made = Corrected(InPlace(), optimizer=Fails)
    with pytest.raises(ZeroDivisionError):
        made.step(0, read=-1)
    assert made.group["lr"] == 0.5
    assert "boost" not in made.group


# -- views --------------------------------------------------------------------------------------


class Doubles(Correction):
    def before_forward(self, at, weights, optimizer):
        for weight in weights.values():
            weight.mul_(2 * at.staleness)


def test_micro_batches_read_what_corrections_have_made_of_a_version():
    made = Corrected(Doubles()).step(0)
    made.own.begin(3, 1, 3)
    made.step(1)
    assert [leaf.tolist() for leaf in made.own.leaves(3)] == [[2, 2], [2, 2]]
    assert made.module["w"].tolist() == [0, 0]
    assert [key.path for key in made.rule.views(1)] == [("view", 1, 2)] * 2
    assert not made.rule.lacks_views()


def test_a_stage_without_an_optimizer_makes_no_views():
    made = Corrected(Doubles())
    made.rule.after(Update(0, [], [], []), None)
    assert made.rule.views() == {}


def test_a_version_that_is_read_for_ever_is_refused(monkeypatch):
    made = Corrected(Doubles())
    monkeypatch.setattr(type(made.plan), "reads", lambda self, stage, m: min(m, 1))
    with pytest.raises(ConfigError, match="stage 0 would read version 1 for 1000 updates by the"):
        made.step(0)


# -- state --------------------------------------------------------------------------------------


class Remembers(Doubles):
    """Remembers of each weight the last change and how many there were, and goes on by these."""

    def after_step(self, at, weights, before):
        for name, weight in weights.items():
            kept = self.state.setdefault(name, {"change": torch.zeros_like(weight), "count": 0})
            weight.add_(kept["change"], alpha=0.5)
            kept["change"] = weight - before[name]
            kept["count"] += 1


def test_a_run_goes_on_with_state_and_views():
    remembers = Remembers()
    made, again = Corrected(Remembers(), Doubles()), Corrected(remembers, Doubles())
    for number in range(3):
        made.step(number)
        again.step(number)
    state = {key: copy.deepcopy(value) for key, value in made.rule.state().items()}
    kept = {"corrections/w/state/#0/change", "corrections/w/state/#0/count"}
    views = {f"corrections/w/view/#{version}/#2" for version in made.own.ledger.kept}
    assert {key for key in by_text(state) if "/w/" in key} == kept | views
    remembers.state["w"] = {"change": torch.full((2,), 9.0), "odd": 1}
    for tensor in again.rule.views().values():
        tensor.fill_(9)
    again.rule.load_state(state, 3)
    assert by_text(again.rule.state()).keys() == by_text(state).keys()
    assert all(torch.equal(again.rule.views()[key], t) for key, t in made.rule.views().items())
    for each in (made, again):
        each.step(3)
    assert_same(dict(again.module.items()), dict(made.module.items()))
    assert remembers.state["w"]["count"] == 4


def test_a_restore_without_a_view_is_told():
    made = Corrected(Doubles())
    made.step(0)
    views = made.rule.state()
    assert not made.rule.lacks_views()
    other = Corrected(Doubles())
    with other.own.making([None] * 2, 0):
        pass
    assert other.rule.lacks_views()
    del views[StateKey("corrections", "v", ("view", 1, 2))]  # half of it is none
    other.rule.load_state(views, 1)
    assert other.rule.lacks_views()
    other.rule.load_state(made.rule.state(), 1)
    assert not other.rule.lacks_views()


def test_state_of_corrections_that_are_no_more_is_left_out():
    made = Corrected(Remembers())
    keys = [("w", ("state", 1, "x")), ("w", ("state", -1, "x")), ("z", ("state", 0, "x"))]
    made.rule.load_state({StateKey("corrections", *key): torch.ones(2) for key in keys}, 1)
    assert made.rule.state() == {}


def test_statistics_are_the_bytes_of_state_and_views():
    made = Corrected(Remembers())
    assert made.rule.statistics() == {"correction_bytes": 0}
    made.step(0)
    assert made.rule.statistics() == {"correction_bytes": 2 * 8 + 2 * 8}


# -- what is refused ----------------------------------------------------------------------------


def replaces(self, at, weights, before):
    for name in weights:
        weights[name] = weights[name] * 0.5


def assigns(self, at, weights, before):
    for weight in weights.values():
        weight.data = weight * 0.5


def keeps(make):
    """A hook that keeps in the state what ``make(name, weight, before)`` returns."""

    def after_step(self, at, weights, before):
        for name, weight in weights.items():
            self.state[name] = make(name, weight, before[name])

    return {"after_step": after_step}


@pytest.mark.parametrize(
    ("hooks", "words"),
    [
        ({"after_step": replaces}, "after_step put another tensor"),
        ({"after_step": assigns}, "after_step put another tensor"),
        (
            {"before_forward": lambda self, at, weights, optimizer: weights},
            "before_forward returned a dict, which nobody",
        ),
        (
            keeps(lambda _, now, old: {0: now - old}),
            "on stage 0 keep.*under 0, which must be a text",
        ),
        (keeps(lambda _, now, old: now - old), "on stage 0 keep.*must be a dictionary"),
        (keeps(lambda _, now, old: {"last": now}), "on stage 0 keep.*keep a clone"),
        (keeps(lambda _, now, old: {"last": old}), "on stage 0 keep.*keep a clone"),
        (
            keeps(lambda _, now, old: dict.fromkeys("ab", now - old)),
            "on stage 0 keep.*keep a clone",
        ),
        (
            {"before_step": lambda self, *_: self.state.update(other={"x": torch.ones(1)})},
            "on stage 0 keeps state under 'other'",
        ),
    ],
)
def test_what_a_hook_must_not_do_is_refused_at_the_first_update(hooks, words):
    with pytest.raises(ConfigError, match=f"Made[. ]{words}"):
        Corrected(type("Made", (Correction,), hooks)()).step(0)
