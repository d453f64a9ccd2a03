"""A reference to a stage: an RRef of torch RPC, and the methods of the stage that it reaches.

The RRef says where the module is, and fetches a copy of it. Methods are not called over torch RPC,
whose threads would run them in the middle of a step: they go into the feed, like micro-batches, and
the stage does them in its turn. So they see what the updates before them have made and nothing
else, and a run with them has the bits of a run without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipedream_rt.cluster.interface import Reference
from pipedream_rt.coordinator.feed.feeder import Feeder
from pipedream_rt.coordinator.parameters import refuse_left_out, worker_of
from pipedream_rt.coordinator.recovery.group import WorkerGroup
from pipedream_rt.errors import ConfigError
from pipedream_rt.messages.message import CommandName
from pipedream_rt.stage.remote_methods import METHODS

REACHED = (*METHODS, "train", "eval")
_OF_SEQUENCES = ("forward", "train", "eval")


class PendingResult:
    """The result to come of a stage's method; it stands for a future, and for an RRef, of torch."""

    def __init__(self, owner: str, collect: Callable[[], Any]) -> None:
        self._owner = owner
        self._collect: Callable[[], Any] | None = collect
        self._result: Any = None
        self._error: ConfigError | None = None

    def wait(self) -> Any:
        if self._collect is not None:
            collect, self._collect = self._collect, None
            try:
                self._result = collect()
            except ConfigError as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return self._result

    def to_here(self) -> Any:
        return self.wait()

    def owner_name(self) -> str:
        """Return the name of the worker that computes it."""
        return self._owner


class _Methods:
    """The methods of a stage; each returns what ``finish`` makes of its `PendingResult`."""

    def __init__(self, reference: StageReference, finish: Callable[[PendingResult], Any]) -> None:
        self._reference = reference
        self._finish = finish

    def __dir__(self) -> list[str]:
        return list(REACHED)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in REACHED:
            raise ConfigError(
                f"a reference to a stage does not reach {name!r}; it reaches {', '.join(REACHED)}. "
                "pipe.on_stages(function) calls any function with the module of every stage"
            )
        return lambda *args, **named: self._finish(self._reference.ask(name, args, named))


class StageReference:
    """A reference to the module of a stage, which its worker owns."""

    def __init__(self, index: int, group: WorkerGroup, feeder: Feeder) -> None:
        self._index = index
        self._group = group
        self._feeder = feeder

    def rpc_sync(self) -> Any:
        """Return the stage's methods, which return their results: ``rref.rpc_sync().memory()``.

        What they do is listed in the reference; all of them flush the pipe first.
        """
        return _Methods(self, PendingResult.wait)

    def rpc_async(self) -> Any:
        """Return the stage's methods, which return a `PendingResult` at once, to ``wait`` for."""
        return _Methods(self, lambda pending: pending)

    def remote(self) -> Any:
        """Return the stage's methods, which return a `PendingResult` at once, to fetch ``to_here``.

        Unlike with torch's, the result travels as soon as it is there.
        """
        return self.rpc_async()

    def to_here(self) -> Any:
        """Return a copy of the module; flush before. It comes over torch RPC."""
        return self._rref().to_here()

    def local_value(self) -> Any:
        """Return the module itself, where the stage is in this process."""
        return self._rref().local_value()

    def owner_name(self) -> str:
        """Return the name of the worker that owns the module."""
        return worker_of(self._index, self._group)

    def _rref(self) -> Reference:
        """Return the RRef of this generation."""
        group = self._group
        refuse_left_out(group.cluster)
        address = group.plan.address_of(self._index)
        return group.call(lambda cluster: cluster.reference(address, "module"))

    def ask(self, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> PendingResult:
        """Put the call of a method into the feed, behind all that was fed before."""
        group, index = self._group, self._index
        if name in _OF_SEQUENCES and not self._feeder.forwards.is_sequence:
            raise ConfigError(
                f"{name} of a stage alone is for sequences of layers: the forward of a model given "
                "whole is recorded in one mode for all stages, for each shape of a mini-batch. "
                "Call pipe(x), pipe.train() or pipe.train(False)"
            )
        self._feeder.flush()
        if name in ("train", "eval"):
            mode = self._mode_of(name, args, named)
            position = group.feed.command(CommandName.TRAINING, (index, mode))
        else:
            position = group.feed.command(CommandName.METHOD, [index, name, list(args), named])

        generation = group.recovery.generation

        def collect() -> Any:
            if group.recovery.generation != generation:  # the reply went with the workers of then
                if name not in METHODS:
                    return None  # a recovery feeds train and eval again, and they return nothing
                raise ConfigError(
                    f"the result of {name} of stage {index} was lost in a recovery, before anybody "
                    "had waited for it; ask again"
                )
            try:
                return group.of_stages(group.replies(position))[index]
            finally:
                if name in METHODS:
                    group.feed.log.forget(position)

        return PendingResult(self.owner_name(), collect)

    def _mode_of(self, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """Return the mode that a call of ``train`` or ``eval`` sets."""
        args = (*args, *named.values())
        if set(named) - {"mode"}:
            raise ConfigError(f"{name} of a stage takes no arguments {', '.join(named)}")
        most = 1 if name == "train" else 0
        if len(args) > most or any(not isinstance(each, bool) for each in args):
            raise ConfigError(f"{name} of a stage takes {'one bool' if most else 'no argument'}")
        return name == "train" and all(args)
