"""Who has started the workers of a pipeline that are no children of the script, and keeps them."""

from __future__ import annotations

from collections.abc import Callable, Collection

from pipedream_rt.cluster.engines.base import Keeper

_BY_HAND = "pipedream-rt worker HOST:PORT --name NAME"


class ByHand:
    """The user, who starts each worker with a command."""

    def __init__(self, command: str = _BY_HAND) -> None:
        self._command = command

    def ending(self, name: str) -> str:
        """See `Keeper.ending`; nobody tells, but what to do is known."""
        return (
            "it was started elsewhere: with --persist it comes back by itself as long as its "
            f"process lives, otherwise start it there again with `{self._command}`"
        )

    def missing(self) -> str:
        return f"start them with `{self._command}`"

    def replace(self, names: Collection[str]) -> None:
        """See `Keeper.replace`; the user does."""


class ByLauncher:
    """A command that has started the same everywhere, and starts again what ends."""

    def __init__(self, title: str, renew: Callable[[], None] | None = None) -> None:
        self._title = title
        self._renew = renew

    def ending(self, name: str) -> str:
        """See `Keeper.ending`; it does not say."""
        return ""

    def missing(self) -> str:
        return f"look at what the other processes of {self._title} say"

    def replace(self, names: Collection[str]) -> None:
        if self._renew is not None:
            self._renew()


BY_HAND: Keeper = ByHand()
