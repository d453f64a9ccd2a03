"""Keepers: who starts, and starts again, the workers that are no children of the script."""

from __future__ import annotations

from collections.abc import Callable, Collection

from pipedream_rt.cluster.engines.base import Keeper

_BY_HAND = "pipedream-rt worker HOST:PORT --name NAME"


class ByHand:
    """The user, who starts each worker with a command."""

    def __init__(self, command: str = _BY_HAND) -> None:
        self._command = command

    def ending(self, name: str) -> str:
        """What the user can do: nobody reports how the worker ended."""
        return (
            "it was started elsewhere: with --persist it comes back by itself as long as its "
            f"process lives, otherwise start it there again with `{self._command}`"
        )

    def missing(self) -> str:
        return f"start them with `{self._command}`"

    def replace(self, names: Collection[str]) -> None:
        """Nothing: the user replaces workers."""


class ByLauncher:
    """A launcher, which starts again what ends; ``renew`` has it replace all workers at once."""

    def __init__(self, title: str, renew: Callable[[], None] | None = None) -> None:
        self._title = title
        self._renew = renew

    def ending(self, name: str) -> str:
        """Empty: a launcher does not report it to the script."""
        return ""

    def missing(self) -> str:
        return f"look at what the other processes of {self._title} say"

    def replace(self, names: Collection[str]) -> None:
        if self._renew is not None:
            self._renew()


BY_HAND: Keeper = ByHand()
