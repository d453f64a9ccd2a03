"""The published planners of PipeDream: the released code's recurrences, and those of the paper.

Both cut a model into stages, give each stage a number of machines, and minimise the time of the
slowest stage or transfer for each mini-batch. Machines come in levels, the lowest first: (4, 2) is
2 servers of 4 machines. Each level has a bandwidth. Above the lowest level a "machine" is a whole
group of the level below, with the plan that is best for what it gets.

A(i, j, m) is the best time for what lies between cuts i and j on m machines, T(i, j) the time on
one machine, P(i, j) the bytes of its weights, a(k) those that pass cut k, B the bandwidth. The
released code (``optimizer_graph_hierarchical.py``), for one level::

    one stage    (T(i, j) + 4 (m-1) P(i, j) / (B m L)) / m         L: machines of the level below
    last stage   (T(k, j) + 4 (m'-1) P(k, j) / (B m')) / m'
    transfers    2 a(k) / (B m' c), and 2 a(j) / (B m' c)          only with a compression c
    A(i, j, m) = min over k, m' of max(A(i, k, m - m'), last stage, transfers), or one stage

and the paper (section 3.1)::

    one stage    max(T(i, j), 2 (m-1) P(i, j) / B) / m
    transfers    2 a(k) / B
    A(i, j, m) = min over k, m' of max(A(i, k, m - m'), last stage, 2 a(k) / B), or one stage

A stage of the paper lies between two cuts of which one contains the other. The released code does
not ask that of the part that a group of machines gets: in a model with branches and on several
levels it takes T(i, j) = T(0, j) - T(0, i) also where neither of i and j contains the other, and so
finds times that no plan has. Which of them it sees depends on an order of cuts that it leaves to
chance. Here all are seen, so the time is never above that of the released code. It is equal where
there are no branches or only one level, and for all profiles that come with the code.

A whole model takes O(cuts^2 machines^2) steps. Each level but the last takes O(cuts^3): a product
of matrices in which multiplying is to take the larger and adding is to take the smaller.

Source: Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training (SOSP 2019).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pipedream_rt.errors import ConfigError
from pipedream_rt.planning.cuts import Cuts, Floats, indices, relations, spans

MODELS = ("pipedream", "paper")
"""The names of the cost models."""

_BLOCK = 64
"""Rows of a product that are computed together, so that they stay in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What a published planner is asked.

    Attributes:
        model: ``"pipedream"`` for the released code, ``"paper"`` for the paper.
        machines: How many machines, or groups of the level below, a group has, by level, the lowest
            first.
        bandwidths: The bytes per second of each level.
        memory: The bytes of a machine for what the released code counts: each stashed version of
            the weights and outputs of a stage, but not the first. Infinite for no limit.
        straight: Whether every stage has one machine.
        fewer: Whether machines may be left over.
        compression: The factor by which activations are compressed; None for transfers that take no
            time, which is the released code's default.

    Raises:
        ConfigError: A number is out of range, or the paper's planner is asked for what it lacks.
    """

    model: str = "pipedream"
    machines: tuple[int, ...] = (1,)
    bandwidths: tuple[float, ...] = (1e9,)
    memory: float = math.inf
    straight: bool = False
    fewer: bool = False
    compression: float | None = None

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.model not in MODELS:
            raise ConfigError(f"the cost models are {' and '.join(MODELS)}, not {self.model!r}")
        if not self.machines or len(self.machines) != len(self.bandwidths):
            raise ConfigError(
                f"{len(self.machines)} levels of machines need as many bandwidths, not "
                f"{len(self.bandwidths)}"
            )
        if math.prod(self.machines) > 1024:
            raise ConfigError(f"a plan has at most 1024 machines, not {math.prod(self.machines)}")
        if min(self.machines) < 1:
            raise ConfigError(f"machines must be at least 1 at each level, not {self.machines}")
        for what, values in (
            ("bandwidth", self.bandwidths),
            ("memory", (self.memory,)),
            ("compression", () if self.compression is None else (self.compression,)),
        ):
            if not all(value > 0 for value in values):
                raise ConfigError(f"{what} must be above 0, not {values}")
        if self.model == "paper" and (self.memory < math.inf or self.compression is not None):
            raise ConfigError("the paper's recurrences know no memory and no compression")


def published_passing(cuts: Cuts) -> Floats:
    """For each cut, the bytes that the released code of PipeDream takes to pass."""
    # Those are the outputs of the last layers before the cut, and of each layer p that a last
    # layer x depends on, if p is used outside of what leads to x. The released code does not
    # ask whether that other user is behind the cut.
    before, after = relations(cuts.profile)
    shared = [
        sum(
            1 << p
            for p in indices(before[x])
            if after[p] & ~(before[x] | 1 << x)
        )
        for x in range(len(before))
    ]  # fmt: skip
    outputs = [layer.output_bytes for layer in cuts.profile.layers]
    found = []
    for ideal in cuts.ideals:
        members = 0
        for x in indices(ideal):
            if not after[x] & ideal:
                members |= 1 << x | shared[x]
        found.append(sum(outputs[i] for i in indices(members)))
    return np.array(found, np.float64)


class Piece(NamedTuple):
    """A part of the answer.

    Attributes:
        start: The cut before it; -1 for the beginning of the model.
        end: The cut behind it.
        replicas: The number of machines, or of groups, that it is replicated over at its level.
        pieces: What one of these groups does; empty at the lowest level.
    """

    start: int
    end: int
    replicas: int
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """The best plan.

    Attributes:
        time: The seconds of the slowest stage or transfer for each mini-batch.
        pieces: The pieces of the highest level, in the order of the model.
    """

    time: float
    pieces: tuple[Piece, ...]

    def stages(self) -> list[tuple[int, int, int]]:
        """Return the stages: the cut before, the cut behind, and the machines in all."""
        found: list[tuple[int, int, int]] = []

        def visit(pieces: Sequence[Piece], times: int) -> None:
            for piece in pieces:
                if piece.pieces:
                    visit(piece.pieces, times * piece.replicas)
                else:
                    found.append((piece.start, piece.end, times * piece.replicas))

        visit(self.pieces, 1)
        return found


class _Level:
    """One level of machines, and the best times on it.

    Times are in seconds, by row and column of a span (`cuts.spans`); infinite for what cannot be.
    """

    def __init__(self, cuts: Cuts, asked: Published, number: int, times: Floats) -> None:
        self._cuts, self._asked = cuts, asked
        self._machines, self._bandwidth = asked.machines[number], asked.bandwidths[number]
        self._within = asked.machines[number - 1] if number else 1
        self._weights = spans(cuts.sums("parameter_bytes"))
        self._stashed = self._weights + spans(cuts.sums("output_bytes"))
        self._stashed_between = _between(self._stashed)
        # By row and column, whether a front (all stages but the last) can end at the cut. The
        # released code only asks that it is not within the cut before: see the head of this file.
        same = np.eye(len(cuts), dtype=bool)
        behind = cuts.includes if asked.model == "paper" else ~cuts.includes.T & ~same
        self._front = np.vstack([np.ones(len(cuts), bool), behind])
        self._times = np.where(self._front, times, math.inf)
        self._stages: dict[int, Floats] = {}

    def _one(self, machines: int) -> Floats:
        """Return, by row and column, the time of a span that is one stage on so many machines."""
        extra = 4 * (machines - 1) * self._weights / (self._bandwidth * machines * self._within)
        found = self._shared(machines, self._times, self._weights, extra)
        found[self._stashed > self._limit(machines, machines)] = math.inf
        return found

    def _shared(self, machines: int, times: Floats, weights: Floats, extra: Floats) -> Floats:
        """Return the times of stages with replicas, all-reduce included."""
        if self._asked.model == "paper":
            longest = np.maximum(times, 2 * (machines - 1) * weights / self._bandwidth)
            times, extra = longest, np.zeros(1)
        found: Floats = (times + extra) / machines
        return found

    def _limit(self, machines: int, used: int) -> float:
        """Return how many bytes of weights and outputs a stage of ``machines`` may have."""
        # The released code counts a version for each group of as many machines behind the stage.
        copies = math.ceil((self._machines - used) / machines)
        return self._asked.memory / copies if copies else math.inf

    def _last(self, machines: int) -> Floats:
        """Return, by the cuts behind and before it, the time of a stage that is not the first."""
        # Kept by machines: every row and every split asks for it.
        if machines not in self._stages:
            weights = _between(self._weights)
            extra = 4 * (machines - 1) * weights / (self._bandwidth * machines)
            found = self._shared(machines, _between(self._times), weights, extra)
            found[~self._cuts.includes.T] = math.inf
            self._stages[machines] = np.maximum(found, self._transfers(machines))
        return self._stages[machines]

    def _transfers(self, machines: int) -> Floats:
        """Return, by the cuts behind and before a stage, the time of its transfers."""
        if self._asked.model == "paper":
            before: Floats = 2 * self._cuts.passing / self._bandwidth
            return before[None, :]
        if self._asked.compression is None:
            return np.zeros((1, 1))
        shared = self._bandwidth * machines * self._asked.compression
        each = 2 * published_passing(self._cuts) / shared
        behind = np.append(each[:-1], 0.0)  # the output of the model goes nowhere
        found: Floats = np.maximum(each[None, :], behind[:, None])
        return found

    def _after(self, fronts: Floats, machines: int, used: int) -> Floats:
        """Return the best times with a last stage behind each of several fronts."""
        limit = self._limit(machines, used)
        stashed = self._stashed_between if math.isfinite(limit) else None
        return _product(fronts, self._last(machines), stashed, limit)

    def row(self, row: int) -> list[Floats]:
        """Return the best times of the spans that begin at a cut: entry m is for m + 1 machines."""
        found: list[Floats] = []
        for used in range(1, self._machines + 1):
            best = self._one(1 if self._asked.straight else used)[row].copy()
            if self._asked.straight and used > 1:
                best[:] = math.inf
            if self._asked.fewer and found:
                best = np.minimum(best, found[-1])
            for machines in self._choices(used):
                front = np.where(self._front[row], found[used - machines - 1], math.inf)
                np.minimum(best, self._after(front[None], machines, used)[0], out=best)
            found.append(best)
        return found

    def _choices(self, used: int) -> range:
        """Return how many machines the last of several stages may have."""
        return range(1, min(used, 2) if self._asked.straight else used)

    def all_rows(self) -> Floats:
        """Return the best times of all spans on all machines of a group."""
        found: list[Floats] = []
        for used in range(1, self._machines + 1):
            best = self._one(used)
            if self._asked.straight and used > 1:
                best[:] = math.inf
            if self._asked.fewer and found:
                best = np.minimum(best, found[-1])
            for machines in self._choices(used):
                front = found[used - machines - 1]
                np.minimum(best, self._after(front, machines, used), out=best)
            found.append(best)
            # With machines left, it is only used as a front from now on.
            if used < self._machines:
                found[-1] = np.where(self._front, best, math.inf)
        return found[-1]

    def ends(self) -> Floats:
        """Return the same for spans that begin or end the model; others are infinite."""
        # `behind[m][c]` is the best time of all that is behind cut c on m machines. All spans that
        # end the model share it, so they cost no more than a row.
        count, machines = len(self._cuts), self._machines
        behind = [np.full(count, math.inf) for _ in range(machines + 1)]
        for left in range(machines + 1):
            best = behind[left]
            if left == 0 or self._asked.fewer:
                best[-1] = 0.0
            if left and self._asked.fewer:
                np.minimum(best, behind[left - 1], out=best)
            for mine in range(1, 1 + (min(left, 1) if self._asked.straight else left)):
                stage = np.maximum(self._last(mine), behind[left - mine][:, None])
                stage[self._stashed_between > self._limit(mine, machines - left + mine)] = math.inf
                np.minimum(best, stage.min(axis=0), out=best)
        found = np.full((count + 1, count), math.inf)
        for mine in range(1, 2 if self._asked.straight else machines + 1):
            first = np.where(self._front, self._one(mine), math.inf)
            best = np.maximum(first, behind[machines - mine][None, :]).min(axis=1)
            found[:, -1] = np.minimum(found[:, -1], best)
        found[0] = self.row(0)[-1]
        return found

    def pieces(self, row: int, end: int) -> list[tuple[int, int, int]]:
        """Return the pieces of the best plan of a span: row, cut behind, machines or groups."""
        best, used = self.row(row), self._machines
        found: list[tuple[int, int, int]] = []
        while True:
            goal = best[used - 1][end]
            # Machines that gain nothing stay idle.
            while self._asked.fewer and used > 1 and best[used - 2][end] <= goal:
                used -= 1
            if not (self._asked.straight and used > 1) and self._one(used)[row, end] <= goal:
                return [(row, end, used), *reversed(found)]
            machines, cut = self._split(row, end, used, best, goal)
            found.append((cut + 1, end, machines))
            used, end = used - machines, cut

    def _split(
        self, row: int, end: int, used: int, best: list[Floats], goal: float
    ) -> tuple[int, int]:
        """Return the machines of the last stage of the best plan, and the cut before that stage."""
        for machines in self._choices(used):
            front = np.where(self._front[row], best[used - machines - 1], math.inf)
            fits = self._stashed_between[end] <= self._limit(machines, used)
            reached = fits & (np.maximum(front, self._last(machines)[end]) <= goal)
            if reached.any():
                return machines, int(np.argmax(reached))
        raise AssertionError("the best time has no plan")


def _between(times: Floats) -> Floats:
    """Turn values by row and column into values by the cuts behind and before."""
    return np.ascontiguousarray(times[1:].T)


def _product(left: Floats, right: Floats, sizes: Floats | None, most: float) -> Floats:
    """Return the (min, max) product: for each pair of rows, the least larger of two elements."""
    # The columns of both are cuts. The rows of `left` are those of spans, or one alone. The rows of
    # `right` are cuts too; a column that is not before the cut of its row is infinite, so each
    # block ends at its last row, and begins where `left` has finite values.
    found = np.full((len(left), len(right)), math.inf)
    # Blocks of both stay in the cache. With many rows a block has one row of `right` alone.
    wide = 1 if len(left) > 1 else _BLOCK
    for top in range(0, len(left), _BLOCK):
        rows = left[top : top + _BLOCK]
        low = int(np.argmax(np.isfinite(rows).any(axis=0)))
        for first in range(low, len(right), wide):
            here = np.s_[first : first + wide, low : first + wide]
            larger = np.maximum(rows[:, here[1]], right[here])
            if sizes is not None:
                larger[np.broadcast_to(sizes[here] > most, larger.shape)] = math.inf
            least = larger.min(axis=1, initial=math.inf)
            found[top : top + _BLOCK, first : first + wide] = least[:, None] if wide == 1 else least
    return found


def solve(cuts: Cuts, asked: Published) -> Answer:
    """Return the best plan of a published planner.

    Args:
        cuts: The cuts of the model.
        asked: The machines and the cost model.

    Raises:
        ConfigError: No plan has enough memory.
    """
    compute = sum(cuts.sums(name) for name in ("forward", "backward_input", "backward_weight"))
    times, levels = spans(np.asarray(compute)), []
    for number in range(len(asked.machines)):
        levels.append(_Level(cuts, asked, number, times))
        if number + 2 == len(asked.machines) and asked.machines[-1] == 2:
            times = levels[-1].ends()  # a piece of a plan for two groups begins or ends the model
        elif number + 1 < len(asked.machines):
            times = levels[-1].all_rows()
    end = len(cuts) - 1
    time = float(levels[-1].row(0)[-1][end])
    if math.isinf(time) and asked.model == "paper":
        raise ConfigError(
            "there is no plan: the model has too few layers for so many machines without replicas"
        )
    if math.isinf(time):
        raise ConfigError(
            f"no plan fits {asked.memory:g} bytes on each of {math.prod(asked.machines)} machines, "
            "as the released code counts them; give more memory or more machines"
        )
    return Answer(time, _pieces(levels, 0, end))


def _pieces(levels: Sequence[_Level], row: int, end: int) -> tuple[Piece, ...]:
    """Return the pieces of the best plan of a span, each with those of the level below."""
    *below, level = levels
    return tuple(
        Piece(start - 1, stop, replicas, _pieces(below, start, stop) if below else ())
        for start, stop, replicas in level.pieces(row, end)
    )
