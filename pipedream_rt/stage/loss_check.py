"""Compares the loss of a whole mini-batch with the weighted mean of its micro-batches' losses.

A pipeline trains on micro-batches as if these two were equal. They are equal for a mean over
samples or labels. For a loss that compares samples with each other, or adds them up, the run would
silently train on something else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor

from pipedream_rt.devices.randomness import kept_generator_state
from pipedream_rt.errors import ConfigError
from pipedream_rt.messages.tree import Value, flatten, unflatten
from pipedream_rt.models.preserving_state import kept_outside
from pipedream_rt.models.shipping import classes_kept, copying
from pipedream_rt.stage.spec import LossFunction, total_of
from pipedream_rt.telling import log_of

_log = log_of(__name__)

_MOST_BYTES = 1 << 28
"""How large a mini-batch's outputs may be; of larger ones, two micro-batches are compared."""

# By dtype, the relative rounding error that a loss may have.
_ROUNDING = {torch.float64: 1e-7, torch.float32: 1e-4}

_DRAWS = "the loss draws random numbers (is a dropout inside of it?)"

_STATE = (
    "for the same micro-batch it is another one after it was computed of others, so it keeps a "
    "state (a count, a moving mean, a random generator of its own)"
)


def not_compared(why: str) -> str:
    """Return the warning about a loss that cannot be compared."""
    return (
        f"the loss of a mini-batch was not compared with those of its micro-batches: {why}. "
        "Training is right if the loss is a mean over samples, or over what weigh counts; "
        "Training(check_loss=0) leaves this out"
    )


RANDOM = not_compared(_DRAWS)
"""The warning about a loss that cannot be compared."""

_Flat: TypeAlias = tuple[Any, Sequence[Tensor]]
_Pair: TypeAlias = tuple[_Flat, _Flat]  # an output and a target


class Compared(NamedTuple):
    """A micro-batch whose loss is compared.

    Attributes:
        share: Its share of what the mini-batch weighs.
        samples: Their number.
    """

    output: Any
    target: Any
    share: float
    samples: int


class Verdict(NamedTuple):
    """The verdict on a loss, by the micro-batches of a mini-batch.

    Attributes:
        is_mean: Whether the loss of all is the weighed mean of theirs; None if that is not known.
        why: The reason why it is not, or why that is not known, in words.
        is_of_all: Whether it may have to be computed of all samples at once.
    """

    is_mean: bool | None
    why: str = ""
    is_of_all: bool = False


class LossCheck:
    """Keeps the first micro-batches of a mini-batch until it can compare their loss."""

    def __init__(self, loss: LossFunction) -> None:
        self._loss = loss
        self._parts: list[Compared] = []
        self._seen = self._of = self._enough = 0
        self._is_done = self._is_given_up = False

    def keep(self, output: Any, target: Value, share: float, parts: int, samples: int) -> None:
        """Keep a copy of a micro-batch, one of `parts`, of `samples` samples, before its loss.

        The loss may change output and target in place.
        """
        if self._is_given_up or parts < 2:
            return
        structure, tensors = flatten(output)
        if not self._is_done:
            copied = unflatten(structure, [t.detach().clone() for t in tensors])
            wanted = unflatten(target.structure, [t.clone() for t in target.tensors])
            self._parts.append(Compared(copied, wanted, share, samples))
        self._enough, self._of = 2 if are_large(tensors, parts) else parts, parts

    def compare(self) -> None:
        """Compare once all micro-batches of the mini-batch are kept. Call it after each `keep`."""
        if self._is_given_up or self._of < 2:
            return
        if len(self._parts) == self._enough:
            kept, self._parts, self._is_done = self._parts, [], True
            found = verdict(self._loss, kept)
            if found.is_mean is False:
                raise ConfigError(f"{found.why}, so {_ADVICE}")
            if found.is_mean is None:
                self._is_given_up = True
                _log.warning("%s", not_compared(found.why))
        self._seen += 1
        if self._seen == self._of:  # the next one is of another mini-batch
            self._seen, self._is_done = 0, False


def are_large(outputs: Sequence[Tensor], parts: int) -> bool:
    """Whether the outputs of one of several parts are too large to copy those of all."""
    return parts * sum(tensor.nbytes for tensor in outputs) > _MOST_BYTES


def verdict(loss: LossFunction, parts: Sequence[Compared], precisely: bool = True) -> Verdict:
    """Compare the loss of some micro-batches together with the weighed mean of theirs.

    ``precisely``: in double precision, where the loss can be computed in it. The run draws the same
    random numbers as without this comparison.
    """
    with kept_generator_state(), kept_outside(), torch.no_grad():
        return _verdict(loss, parts, (True, False) if precisely else (False,))


def _verdict(loss: LossFunction, parts: Sequence[Compared], doubles: Sequence[bool]) -> Verdict:
    samples = [part.samples for part in parts]
    whole = joined([part.output for part in parts], samples)
    target = joined([part.target for part in parts], samples)
    if whole is None or target is None:
        what = "outputs" if whole is None else "targets"
        why = "they differ in structure or shape, or have no dimension of samples"
        return Verdict(None, f"their {what} cannot be joined: {why}", is_of_all=True)
    try:
        copy = copying(loss)
    except Exception as error:  # what it holds may be of any class
        return Verdict(None, f"it cannot be copied ({error})", is_of_all=True)
    pairs = [(flatten(part.output), flatten(part.target)) for part in parts]
    answer = Verdict(None)
    # Double precision first: hardly anything of a difference is rounding there.
    for double in doubles:
        try:
            found = _losses(copy, pairs, (whole, target), double)
        except _OfPart as error:
            n = samples[error.number]
            why = f"it cannot be computed of {n} of the {sum(samples)} samples ({error.__cause__})"
            answer = Verdict(None, why, is_of_all=True)
        except Exception as error:  # the user's code, given more, or another dtype
            answer = Verdict(
                None, f"it cannot be computed of all of them ({error})", is_of_all=True
            )
        else:
            return _judged(found, [part.share for part in parts])
    return answer


def _judged(found: _Losses, shares: Sequence[float]) -> Verdict:
    """Return the verdict on the losses of a mini-batch."""
    rounding = rounding_of(found.whole.dtype)
    first = float(found.parts[0])

    def differs(other: Tensor) -> bool:
        return abs(float(other) - first) > rounding * max(abs(float(other)), abs(first))

    if differs(found.reseeded):
        return Verdict(None, _DRAWS, is_of_all=True)
    weighed = [(float(loss), share) for loss, share in zip(found.parts, shares, strict=True)]
    odd = [loss for loss, share in weighed if share and not math.isfinite(loss)]
    if odd and math.isfinite(float(found.whole)):
        why = f"it is {odd[0]} for one of {len(weighed)} micro-batches, and finite for all of them"
        return Verdict(None, why, is_of_all=True)
    why = why_no_mean(float(found.whole), weighed, rounding)
    if differs(found.later):  # each was computed by a copy that has computed nothing before
        return Verdict(None if why else True, _STATE, is_of_all=True)
    return Verdict(False, why, is_of_all=True) if why else Verdict(True)


class _OfPart(Exception):
    """A loss raises for one micro-batch, and not for all of them together."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Losses(NamedTuple):
    """Losses of a mini-batch, each computed by a copy of the loss function as it is now.

    Attributes:
        reseeded: The loss of the first part with random numbers of another seed.
        later: The loss of the first part, by a copy that has computed those of all others.
    """

    whole: Tensor
    parts: list[Tensor]
    reseeded: Tensor
    later: Tensor


def _losses(
    copy: Callable[[], LossFunction], parts: Sequence[_Pair], whole: _Pair, double: bool
) -> _Losses:
    def of(*pairs: _Pair, seed: int = 0) -> Tensor:
        """Return the loss of the last of some outputs and targets, after those before it."""
        with classes_kept():
            loss = copy()
            return [_value(loss, each, double, seed) for each in pairs][-1]

    first, *others = parts
    of_whole, of_parts = of(whole), []
    for i, part in enumerate(parts):
        try:
            of_parts.append(of(part))
        except Exception as error:  # the user's code, given fewer samples than it was written for
            raise _OfPart(i) from error
    return _Losses(of_whole, of_parts, of(first, seed=1), of(*others, first))


def _value(loss: LossFunction, pair: _Pair, double: bool, seed: int) -> Tensor:
    """Return the loss of an output and a target, with the random numbers of a seed."""
    # Copies, since a loss may keep something or work in place.
    output, target = (
        unflatten(structure, [_in_double(t) if double else t.clone() for t in tensors])
        for structure, tensors in pair
    )
    torch.manual_seed(seed)
    if double and isinstance(loss, torch.nn.Module):
        loss = loss.double()
    total: Tensor = total_of(loss(output, target))[0]
    return total.detach().reshape(())


def rounding_of(dtype: torch.dtype) -> float:
    """Return the relative rounding error that a loss may have, computed in a dtype."""
    return _ROUNDING.get(dtype, 3e-2)


_ADVICE = (
    'training on micro-batches would train something else. Training(loss="whole") computes it of '
    "whole mini-batches, in the schedule gpipe. Or say what a micro-batch weighs, as "
    "Training(weigh=lambda x, y: (y != -100).sum()) for ignored labels, or weights[y].sum() for "
    "weights of classes; or, if the loss is made for parts of a mini-batch, leave this comparison "
    "out: Training(check_loss=0)"
)
_OWN = (
    "training on micro-batches would train something else. The model computes it, so give it whole "
    'mini-batches: micro_batches=1, schedule="gpipe". Or say what a micro-batch weighs, as '
    "Training(weigh=lambda x, y: (y != -100).sum()) for ignored labels; or, if the loss is made "
    "for parts of a mini-batch, leave this comparison out: Training(check_loss=0)"
)


def refuse_own_loss(why: str) -> NoReturn:
    """Refuse to train on micro-batches by a model's own loss, which is no mean over samples."""
    raise ConfigError(f"{why}, so {_OWN}")


def why_no_mean(whole: float, parts: Sequence[tuple[float, float]], rounding: float) -> str:
    """Say why a loss is not the weighed mean of its parts, (loss, share); empty if it is."""
    total: float = sum(share for _, share in parts)
    # A part that weighs nothing may have a NaN as loss: the mean over no label.
    weighed = [value * (share / total) for value, share in parts if share]
    mean = sum(weighed)
    size = max(abs(whole), sum(map(abs, weighed)))
    # A loss that is NaN or infinite is refused elsewhere.
    if not (size < float("inf") and abs(whole - mean) > rounding * size):
        return ""
    return (
        f"the loss is no mean over samples: for {len(parts)} micro-batches together it is "
        f"{whole:.6g}, and the weighed mean of theirs is {mean:.6g}"
    )


def joined(values: Sequence[Any], samples: Sequence[int]) -> _Flat | None:
    """Return values joined along their samples, flattened; None if they cannot be joined."""
    structures, tensors = zip(*map(flatten, values), strict=True)
    if any(structure != structures[0] for structure in structures):
        return None
    whole: list[Tensor] = []
    for parts in zip(*tensors, strict=True):
        # A dimension of samples has as many rows for each sample in every part. A tensor without it
        # must be the same in every part.
        rows = {_rows(t, n) for t, n in zip(parts, samples, strict=True)}
        if len(rows) == 1 and 0 not in rows:
            if len({t.shape[1:] for t in parts}) > 1:
                return None
            whole.append(torch.cat(parts))
        elif all(torch.equal(t, parts[0]) for t in parts):
            whole.append(parts[0])
        else:
            return None
    return structures[0], whole


def _rows(tensor: Tensor, samples: int) -> int:
    """Return how many rows a tensor has for each sample; 0 if that is no whole number."""
    count = tensor.size(0) if tensor.dim() else 0
    return 0 if count % samples else count // samples


def _in_double(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, in double precision if it is of floating point."""
    return tensor.to(torch.float64 if tensor.is_floating_point() else tensor.dtype, copy=True)
