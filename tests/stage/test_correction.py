"""What a correction must be: its hooks, its numbers, and the moment at which it is called."""

import dataclasses

import pytest

from pipedream_rt import ConfigError
from pipedream_rt.corrections import (
    Correction,
    DelayCompensation,
    ErrorFeedback,
    Extrapolation,
    StalenessDamping,
    StalenessMomentum,
    StalenessRate,
    WeightPrediction,
)
from pipedream_rt.stage.correction import HOOKS, Moment, overrides, refuse_nonsense, require_number


class Misspelt(Correction):
    def before_steps(self, at, optimizer):
        pass


@dataclasses.dataclass(frozen=True)
class Frozen(Correction):
    def before_step(self, at, optimizer):
        pass


def on_the_object():
    correction = ErrorFeedback()
    correction.before_step = lambda at, optimizer: None
    return correction


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (Correction, "none of the hooks"),
        (Misspelt, "'before_steps', which would never be called"),
        (on_the_object, "'before_step', which would never be called"),
        (Frozen, "must not be frozen"),
    ],
)
def test_hooks_that_would_not_be_called_are_refused(made, words):
    with pytest.raises(ConfigError, match=words):
        refuse_nonsense(made())


@pytest.mark.parametrize(
    ("cls", "options", "words"),
    [
        (WeightPrediction, {"strength": float("nan")}, "must be a number"),
        (Extrapolation, {"strength": "1"}, "must be a number"),
        (Extrapolation, {"decay": "a"}, "must be a number"),
        (DelayCompensation, {"strength": float("inf")}, "must be a number"),
        (DelayCompensation, {"adaptive": True, "decay": 2.0}, "must be a number"),
        (ErrorFeedback, {"limit": "1"}, "must be a number"),
        (StalenessRate, {"updates": "a"}, "must be a number"),
        (StalenessMomentum, {"top": None}, "must be a number"),
        (StalenessDamping, {"power": True}, "must be a number"),
        (StalenessRate, {"updates": 0}, "must be a number of at least"),
        (StalenessDamping, {"power": -1.0}, "must be a number of at least"),
        (StalenessMomentum, {"top": 1.0}, "must be a number of at least"),
        (ErrorFeedback, {"limit": -1.0}, "must be a number of at least"),
        (Extrapolation, {"decay": 1.0}, "must be a number of at least"),
    ],
)
def test_attributes_are_numbers_within_their_bounds(cls, options, words):
    with pytest.raises(ConfigError, match=words):
        cls(**options)


def test_what_overrides_one_hook_is_a_correction():
    """A hook may come from a base between; those that are left alone are not called."""

    class Later(ErrorFeedback):
        pass

    refuse_nonsense(Later())
    assert [hook for hook in HOOKS if overrides(Later(), hook)] == ["after_step"]


def test_a_look_at_a_correction_leaves_it_without_state():
    correction = Extrapolation()
    refuse_nonsense(correction)
    assert "state" not in vars(correction)


def test_a_bound_is_in_the_message_where_there_is_one():
    require_number("power", 0, 0.0)
    require_number("top", 0.5, 0.0, below=1.0)
    with pytest.raises(ConfigError, match=r"^power must be a number of at least 0, not -1$"):
        require_number("power", -1, 0.0)
    with pytest.raises(ConfigError, match=r"^top .* of at least 0, and less than 1, not 1\.0$"):
        require_number("top", 1.0, 0.0, below=1.0)


def test_staleness_is_the_way_from_the_version_read_to_the_update():
    moment = Moment(stage=0, num_stages=3, micro_batches=2, update=7, read=5.5)
    assert moment.staleness == 1.5
