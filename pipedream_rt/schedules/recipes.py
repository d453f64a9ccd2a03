"""The recipes: an order with a version policy under a name, and a line of help about it."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal, TypeAlias

from pipedream_rt.errors import ConfigError
from pipedream_rt.schedules.orders import (
    Async1F1B,
    Flushed1F1B,
    GPipe,
    Interleaved1F1B,
    Order,
    ZeroBubbleH1,
)
from pipedream_rt.schedules.policies import (
    Flushed,
    TwoVersions,
    VersionPolicy,
    VerticalSync,
    WeightStashing,
)
from pipedream_rt.schema import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """An order with a version policy, under a name in `RECIPES`.

    In the formulas n is the workers, k the micro-batches per update, v the stages on each worker,
    and w is w(s), the warm-up forwards of stage s.

    Attributes:
        order: The order of actions.
        versions: The version policy.
        flushes: Whether the pipe is empty at every update.
        summary: The schedule in a few words.
        kept_text: The number of versions kept at stage s, as a formula.
        bubble_text: The share of the time for which a worker is idle, as a formula.
        staleness_text: The staleness, as a formula.
        stages_per_worker: The number of stages on each worker where the user gives none.
    """

    order: Order
    versions: VersionPolicy
    flushes: bool
    summary: str
    kept_text: str = "1"
    bubble_text: str = "(n-1)/(k+n-1)"
    staleness_text: str = "0"
    stages_per_worker: int = 1

    def line(self) -> str:
        """Return the line of help about this schedule."""
        return (
            f"{self.summary}; versions kept {self.kept_text}; bubble {self.bubble_text}; "
            f"staleness {self.staleness_text}"
        )


VERTICAL_SYNC = "+vertical-sync"
"""The end of the name of a schedule whose stages all read the version that the first one reads."""

ScheduleName: TypeAlias = Literal[
    "async-1f1b",
    "async-1f1b+vertical-sync",
    "2bw",
    "1f1b",
    "gpipe",
    "interleaved-1f1b",
    "zero-bubble",
]
"""The name of a built-in schedule."""

RECIPES: dict[str, Recipe] = {
    "async-1f1b": Recipe(
        order=Async1F1B(),
        versions=WeightStashing(),
        flushes=False,
        summary="PipeDream, never a flush",
        kept_text="ceil(w/k)+1",
        bubble_text="0",
        staleness_text="up to ceil(w/k)",
    ),
    "async-1f1b" + VERTICAL_SYNC: Recipe(
        order=Async1F1B(),
        versions=VerticalSync(),
        flushes=False,
        summary="the same, all stages read the version that the first reads",
        kept_text="ceil(w(0)/k)+1",
        bubble_text="0",
        staleness_text="ceil(w(0)/k)",
    ),
    "2bw": Recipe(
        order=Async1F1B(),
        versions=TwoVersions(),
        flushes=False,
        summary="PipeDream-2BW, k > w(0)",
        kept_text="2",
        bubble_text="0",
        staleness_text="1",
    ),
    "1f1b": Recipe(
        order=Flushed1F1B(),
        versions=Flushed(),
        flushes=True,
        summary="PipeDream-Flush, a flush at every update",
    ),
    "gpipe": Recipe(
        order=GPipe(),
        versions=Flushed(),
        flushes=True,
        summary="as 1f1b, with all k activations kept at once",
    ),
    "interleaved-1f1b": Recipe(
        order=Interleaved1F1B(),
        versions=Flushed(),
        flushes=True,
        summary="Megatron, v stages on each worker, k a multiple of n",
        bubble_text="(n-1)/(vk+n-1)",
        stages_per_worker=2,
    ),
    "zero-bubble": Recipe(
        order=ZeroBubbleH1(),
        versions=Flushed(),
        flushes=True,
        summary="ZB-H1, backward in two halves",
        bubble_text="(n-1)/(3k+n-1) for F=I=W",
    ),
}
"""The recipes of the built-in schedules, by name."""


def schedule_named(name: str) -> str:
    """Return the name of a built-in schedule that is written in any case; refuse an unknown one."""
    plain = name.casefold().replace("_", "-")
    if plain in RECIPES:
        return plain
    nearest = get_close_matches(plain, RECIPES, n=len(RECIPES), cutoff=0.0)
    raise ConfigError(
        f"unknown schedule {shown(name, 60)}; there are {', '.join(nearest)} (the nearest first; "
        "`pipedream-rt schedule help` says what each does)"
    )


def describe_schedules() -> str:
    """Return one line for each schedule, and a line that says what the letters mean."""
    width = max(map(len, RECIPES))
    lines = [f"  {name:<{width}}  {recipe.line()}" for name, recipe in RECIPES.items()]
    letters = "(n workers, k micro-batches per update, w = w(s) = n-1-s at stage s, plus slack;\n"
    letters += "  for versions, a stage with r replicas has r (w+1) in the place of w)"
    return "\n".join((*lines, f"  {letters}"))
