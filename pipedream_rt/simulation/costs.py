"""The costs of actions and messages, from which the simulator computes times."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Protocol, TypeAlias

from pipedream_rt.errors import ConfigError
from pipedream_rt.paths import given_path
from pipedream_rt.schema import printable, read_file, shown, write_file

Samples: TypeAlias = tuple[float, ...]
"""The seconds of an action, for each micro-batch (or update) in turn; they repeat cyclically."""

_MOST = 1e15
"""The largest time, size or speed: a larger one is a mistake, and in ns may exceed 64 bits."""

_LARGEST = 1 << 24
"""The most bytes of a file of costs."""

_PER_STAGE = ("forward", "backward", "input_gradient", "weight_gradient", "step")
_BYTES = {
    "activation_bytes": "sent",
    "gradient_bytes": "sent",
    "stash_bytes": "held",
    "weight_bytes": "held",
}


class Correcting(Protocol):
    """The part of a correction for staleness that costs depend on.

    Attributes:
        passes: How often it reads or writes all weights in an update.
    """

    passes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The costs of a run. In a tuple by stage, hop or worker, a single entry stands for all.

    Attributes:
        forward: By stage, the seconds of a forward.
        backward: By stage, the seconds of a backward; by default the sum of its halves.
        input_gradient: By stage, the seconds of the input half of a split backward; by default half
            of ``backward``.
        weight_gradient: By stage, the seconds of the weight half of a split backward; by default
            half of ``backward``.
        step: By stage, the seconds of a step.
        activation_bytes: By stage, the bytes that a forward sends to a consumer.
        gradient_bytes: By stage, the bytes that a backward sends to a producer; by default as many
            as the stage before sends forward.
        stash_bytes: By stage, the bytes that it holds for each micro-batch in flight.
        weight_bytes: By stage, the bytes of one weight version, and so of the gradients that a
            replica sends to each other one.
        latency: The seconds that every message is under way, besides its transmission.
        hop_latency: By hop, between a stage and the next, in both directions: the seconds that a
            message takes besides ``latency``; one entry for each of the n-1 hops, or one for all.
        peer_latency: By stage, the seconds that a message between its replicas takes besides
            ``latency``.
        bandwidth: The bytes per second of each link. A link goes from one worker to another, and
            messages queue for it. Infinite by default.
        overhead: The seconds that a worker spends on sending a message.
        injection: The seconds that the coordinator spends on injecting a micro-batch.
        turnaround: The seconds from the loss that gives a credit back to the next injection, spent
            in the user's loop and loader.
        speed: By worker, its speed; at 2.0 every action takes half the time.

    Raises:
        ConfigError: A value is negative, not a number, or missing.
    """

    forward: tuple[Samples, ...]
    backward: tuple[Samples, ...] = ()
    input_gradient: tuple[Samples, ...] = ()
    weight_gradient: tuple[Samples, ...] = ()
    step: tuple[Samples, ...] = ((0.0,),)
    activation_bytes: tuple[float, ...] = (0.0,)
    gradient_bytes: tuple[float, ...] = ()
    stash_bytes: tuple[float, ...] = (0.0,)
    weight_bytes: tuple[float, ...] = (0.0,)
    latency: float = 0.0
    hop_latency: tuple[float, ...] = (0.0,)
    peer_latency: tuple[float, ...] = (0.0,)
    bandwidth: float = math.inf
    overhead: float = 0.0
    injection: float = 0.0
    turnaround: float = 0.0
    speed: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        """Check the values."""
        for name in _PER_STAGE:
            for samples in getattr(self, name):
                if not samples:
                    raise ConfigError(f"costs: {name} has an entry without a value")
                for value in samples:
                    _check(name, value)
        for name in _BYTES:
            for value in getattr(self, name):
                _check(name, value)
        for name in ("latency", "overhead", "injection", "turnaround"):
            _check(name, getattr(self, name))
        for name in ("hop_latency", "peer_latency"):
            for value in getattr(self, name):
                _check(name, value)
        for name, values in (("bandwidth", (self.bandwidth,)), ("speed", self.speed)):
            for value in values:
                if not isinstance(value, int | float) or not value > 1 / _MOST:
                    raise ConfigError(f"costs: {name} must be above 0, not {value!r}")
        if not self.forward:
            raise ConfigError("costs: forward is missing")
        if not self.backward and not (self.input_gradient and self.weight_gradient):
            raise ConfigError("costs: backward is missing")

    def for_stages(self, num_stages: int, workers: int) -> Costs:
        """Return these costs with an entry for each stage, hop and worker, all filled in.

        Args:
            num_stages: Number of stages.
            workers: Number of workers.

        Raises:
            ConfigError: A tuple has entries for another number of stages, hops or workers.
        """
        backward = self.backward or _added(self.input_gradient, self.weight_gradient)
        halves = tuple(tuple(v / 2 for v in samples) for samples in backward)
        filled = replace(
            self,
            backward=backward,
            input_gradient=self.input_gradient or halves,
            weight_gradient=self.weight_gradient or halves,
        )
        spread: dict[str, Any] = {
            name: _spread(name, getattr(filled, name), num_stages, "stages")
            for name in (
                *_PER_STAGE,
                "activation_bytes",
                "stash_bytes",
                "weight_bytes",
                "peer_latency",
            )
        }
        sent = spread["activation_bytes"]
        spread["gradient_bytes"] = (
            _spread("gradient_bytes", self.gradient_bytes, num_stages, "stages")
            if self.gradient_bytes
            # A gradient is as large as its activation, which the stage before has sent.
            else (0.0, *sent[:-1])
        )
        hops = max(num_stages - 1, 1)  # with one stage too there is an entry, which nothing uses
        return replace(
            filled,
            **spread,
            hop_latency=_spread("hop_latency", self.hop_latency, hops, "hops"),
            speed=_spread("speed", self.speed, workers, "workers"),
        )

    def cut(self, pieces: int) -> Costs:
        """Cut every stage into several stages of equal cost, for interleaving.

        Args:
            pieces: The number of stages to make of each. Each piece sends as many bytes as the
                whole stage did.

        Returns:
            Costs with an entry for each of the new stages.

        Raises:
            ConfigError: ``hop_latency`` differs between hops.
        """

        def shared(by_stage: tuple[Samples, ...]) -> tuple[Samples, ...]:
            return tuple(
                tuple(v / pieces for v in samples) for samples in by_stage for _ in range(pieces)
            )

        def repeated(sizes: tuple[float, ...], share: float) -> tuple[float, ...]:
            return tuple(size * share for size in sizes for _ in range(pieces))

        if len(set(self.hop_latency)) > 1:
            raise ConfigError(
                "costs: hop_latency has an entry for each hop, but there are other hops when "
                "stages are cut into several; give one entry for all"
            )
        times: dict[str, Any] = {name: shared(getattr(self, name)) for name in _PER_STAGE}
        shares = {name: 1.0 if "sent" in _BYTES[name] else 1 / pieces for name in _BYTES}
        sizes: dict[str, Any] = {
            name: repeated(getattr(self, name), shares[name]) for name in _BYTES
        }
        # Stages with replicas are never cut, so no message goes between peers.
        return replace(
            self, **times, **sizes, hop_latency=self.hop_latency[:1], peer_latency=(0.0,)
        )

    def changed(self, **changes: Any) -> Costs:
        """Return these costs with other values for some attributes.

        If ``backward`` changes, each of its halves becomes half of it, unless given too.
        """
        if "backward" in changes:
            changes = {"input_gradient": (), "weight_gradient": (), **changes}
        return replace(self, **changes)

    def corrected(self, corrections: Iterable[Correcting], memory_bandwidth: float) -> Costs:
        """Return these costs with the time that corrections for staleness take in a step.

        A correction that passes over the weights ``passes`` times in an update takes
        ``passes * weight_bytes / memory_bandwidth`` seconds in the step of every stage, even where
        gradients are fresh and it may do nothing. Corrections of gradients really take their time
        in backwards, which is the same for one micro-batch per update.

        Args:
            corrections: Objects of `pipedream_rt.corrections`.
            memory_bandwidth: The bytes that a worker reads or writes per second.

        Raises:
            ConfigError: ``memory_bandwidth`` is not above 0, or the costs have no ``weight_bytes``.
        """
        if not memory_bandwidth > 0:
            raise ConfigError(f"memory_bandwidth must be above 0, not {memory_bandwidth!r}")
        if not any(self.weight_bytes):
            raise ConfigError("costs: corrections take time by weight_bytes, which are missing")
        stages = max(len(self.step), len(self.weight_bytes))
        times = _spread("step", self.step, stages, "stages")
        sizes = _spread("weight_bytes", self.weight_bytes, stages, "stages")
        passes = sum(each.passes for each in corrections)
        more = [passes * size / memory_bandwidth for size in sizes]
        steps = (tuple(t + add for t in samples) for samples, add in zip(times, more, strict=True))
        return replace(self, step=tuple(steps))

    # -- files ----------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the costs to a JSON file, which people may edit.

        Raises:
            ConfigError: The file cannot be written.
        """
        path = given_path(path, "the file of the costs")
        plain = {k: v for k, v in asdict(self).items() if v != ()}
        if math.isinf(self.bandwidth):  # JSON has no infinity
            del plain["bandwidth"]
        try:
            write_file(path, f"{json.dumps(plain, indent=1)}\n".encode())
        except OSError as error:
            raise ConfigError(f"costs cannot be written to {path}: {error.strerror}") from error

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Costs:
        """Return the costs in a file: a JSON object with the attributes of this class.

        A number stands for all stages; a list has an entry for each stage, and an entry may be a
        list of samples. A text may have a unit, as ``"3ms"``, ``"10Gbit"`` or ``"2MB"``.

        Raises:
            ConfigError: The file cannot be read, or a name or value in it is no cost.
        """
        path = given_path(path, "the file of the costs")
        try:
            found = json.loads(read_file(path, _LARGEST))
        except (OSError, ValueError, RecursionError) as error:
            reason = getattr(error, "strerror", None) or printable(str(error))
            raise ConfigError(f"costs cannot be read from {path}: {reason}") from error
        if not isinstance(found, dict):
            raise ConfigError(f"costs in {path} must be a JSON object, not {shown(found, 60)}")
        return costs_of(found)


def costs_of(found: Mapping[str, Any]) -> Costs:
    """Return costs from plain values, as a file or a command line has them.

    Args:
        found: The values by the names of the attributes of `Costs`.

    Raises:
        ConfigError: A name or a value is no cost.
    """
    fields = {name: parsed(name, value) for name, value in found.items()}
    if "forward" not in fields:
        raise ConfigError("costs: there is no 'forward', the time of each stage's forward")
    return Costs(**fields)


def parsed(name: str, value: Any) -> Any:
    """Return one attribute of `Costs` from a number, a text with a unit, or a list of these."""
    known = [field.name for field in fields(Costs)]
    if name not in known:
        raise ConfigError(f"costs: {shown(name, 60)} is none of {', '.join(known)}")
    entries = value if isinstance(value, list | tuple) else [value]
    if name in _PER_STAGE:
        return tuple(
            tuple(seconds(v) for v in (e if isinstance(e, list | tuple) else [e])) for e in entries
        )
    if name in _BYTES:
        return tuple(size(entry) for entry in entries)
    if name in ("hop_latency", "peer_latency"):
        return tuple(seconds(entry) for entry in entries)
    if name == "speed":
        return tuple(_number(name, entry) for entry in entries)
    if len(entries) != 1:
        raise ConfigError(f"costs: {name} is one value, not {shown(value, 60)}")
    return rate(entries[0]) if name == "bandwidth" else seconds(entries[0])


def _check(name: str, value: float) -> None:
    """Refuse what is no number of at least 0 and at most `_MOST`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ConfigError(f"costs: {name} must be a number of at least 0, not {value!r}")
    if value > _MOST:
        raise ConfigError(f"costs: {name} is {value:g}, more than {_MOST:g}; mind the units")


def _added(first: tuple[Samples, ...], second: tuple[Samples, ...]) -> tuple[Samples, ...]:
    """Return the costs of whole backwards from those of their halves, entry by entry."""
    count = max(len(first), len(second))
    pairs = zip(
        _spread("input_gradient", first, count, "entries"),
        _spread("weight_gradient", second, count, "entries"),
        strict=True,
    )
    return tuple(tuple(a + b for a, b in zip(x, y)) for x, y in pairs)


def _spread(name: str, entries: Sequence[Any], count: int, what: str) -> tuple[Any, ...]:
    """Return ``count`` entries: the given ones, or the only one repeated."""
    if len(entries) == 1:
        return tuple(entries) * count
    if len(entries) != count:
        raise ConfigError(f"costs: {name} has {len(entries)} entries, there are {count} {what}")
    return tuple(entries)


_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PREFIXES = {
    "": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12,
    "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40,
}  # fmt: skip
_QUANTITY = re.compile(r"\s*([0-9.eE+-]+?)\s*([a-zA-Zµ]*(?:/[a-zA-Z]+)?)\s*")
# Only the case of a single b matters: B is a byte, b a bit.
_SIZE = re.compile(r"((?i:[kmgt]i?)?)(?:(B|(?i:bytes?))|(?:b|(?i:bits?)))((?i:ps|/s|/sec)?)")
_OF_BYTES = "B, kB, MB, GB, TB, KiB, MiB, GiB, TiB"
_OF_BITS = "bit, kbit, Mbit, Gbit, Tbit"


def _quantity(
    what: str, text: str | float, unit_of: Callable[[str], float | None], units: str
) -> float:
    """Return a number from a text that may have a unit."""
    if not isinstance(text, str):
        return _number(what, text)
    match = _QUANTITY.fullmatch(text) if len(text) < 100 else None
    unit = None if match is None else unit_of(match[2])
    if match is None or unit is None:
        raise ConfigError(f"{shown(text, 60)} is no {what}; expected a number and one of {units}")
    return _number(what, match[1]) * unit


def _bytes_in(unit: str, is_rate: bool) -> float | None:
    """Return the bytes of a unit of sizes or rates, which count bits too; None if it is none."""
    match = _SIZE.fullmatch(unit or "B")
    if match is None or (not is_rate and (match[3] or not match[2])):
        return None
    return _PREFIXES[match[1].lower()] / (1 if match[2] else 8)


def _number(what: str, value: str | float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        raise ConfigError(f"{shown(value, 40)} is no {what}; expected a finite number")
    return number


def seconds(text: str | float) -> float:
    """Return a time in seconds from a text as ``"3ms"``; a bare number is seconds."""
    return _quantity("time", text, _SECONDS.get, ", ".join(filter(None, _SECONDS)))


def size(text: str | float) -> float:
    """Return a size in bytes from a text as ``"2MB"``; a bare number is bytes."""
    return _quantity("size", text, lambda unit: _bytes_in(unit, False), _OF_BYTES)


def rate(text: str | float) -> float:
    """Return bytes per second from a text as ``"10Gbit"`` or ``"1GB/s"``, or from a bare number."""
    units = f"{_OF_BYTES}, {_OF_BITS}, alone or as in GB/s, GBps, Gbit/s and Gbps"
    return _quantity("bandwidth", text, lambda unit: _bytes_in(unit, True), units)
