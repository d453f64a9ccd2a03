"""The workers that host a pipeline's stages, as the objects in the script use them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pipedream_rt.cluster.interface import Cluster
from pipedream_rt.coordinator.recovery.feed_log import Role
from pipedream_rt.coordinator.recovery.recovery import Recovery
from pipedream_rt.errors import ConfigError
from pipedream_rt.lifecycle import Lifecycle
from pipedream_rt.messages.message import CommandName, Key, Message, Reply, Saved
from pipedream_rt.messages.tree import unflatten
from pipedream_rt.schedules import EdgeKind

T = TypeVar("T")


_WITHOUT_RESULT = {CommandName.FLUSH, CommandName.DROP, CommandName.END_CACHE}
"""Commands that change stages and may be given twice: nobody needs the replies."""


class WorkerGroup:
    """The workers, until nothing refers to this object, or the interpreter ends.

    Every object of the user's that needs the workers refers to it: the pipeline, a pending step,
    the handle of a stage, the optimizer. What `recovery` refers to may not, or workers of a dropped
    pipeline would never end.

    One thread, the coordinator's, uses the group; only the end may come from others.

    Attributes:
        life: See `Recovery`.
        feed: The feed of the stages.
        recovery: The workers of the present generation, and how the next one begins.
        settle: Called before something needs all stages: a script that computes losses then gives
            the gradients that it has, or is refused.
    """

    def __init__(self, recovery: Recovery) -> None:
        self.plan, self.recovery = recovery.plan, recovery
        self.life, self.feed = recovery.life, recovery.feed
        self.settle: Callable[[], object] = lambda: None
        end = weakref.finalize(self, _close, self.life)
        # Else the finalizer would keep what a closed group has.
        recovery.before_workers_end.append(end.detach)

    @property
    def cluster(self) -> Cluster:
        """The workers of the present generation."""
        return self.recovery.cluster

    def check_settings_unchanged(self) -> None:
        """Refuse if nobody may wait for the workers now; ask before anything is fed for that."""
        self.life.check()
        self.cluster.check_settings_unchanged()

    def command(self, name: CommandName, argument: object = None, role: Role = Role.EVERY) -> Any:
        """Feed a command, and wait for the replies of all addresses."""
        self.check_settings_unchanged()
        self.settle()
        position = self.feed.command(name, argument, role)
        try:
            return self.replies(position, again=name.leaves_no_trace or name in _WITHOUT_RESULT)
        finally:
            if name.leaves_no_trace:
                self.feed.log.forget(position)

    def of_stages(self, replies: Sequence[T]) -> list[T]:
        """Return the replies of replica 0 of each stage, from those of all addresses."""
        return [replies[self.plan.address_of(stage)] for stage in range(self.plan.num_stages)]

    def take(self, key: Key, again: bool = False) -> Message:
        """Wait for a message; see `Recovery.take`."""
        return self.recovery.take(key, again)

    def replies(
        self, position: int, kind: EdgeKind = EdgeKind.REPLY, again: bool = False
    ) -> list[Any]:
        """Wait for the replies of all stages, of each replica, to the command at a position.

        ``again``: whether the caller can give the command once more; see `Recovery.take`.
        """
        found, refused = [], []
        for edge in self.plan.edges(kind):
            message = self.take(Key(edge, position), again)
            assert isinstance(message.payload, Reply | Saved)
            found.append(unflatten(message.payload.structure, message.tensors))
            if isinstance(message.payload, Reply) and message.payload.refused:
                refused.append(f"{self.plan.title_of(edge.source)}: {message.payload.refused}")
        if refused:  # raised when all were taken, so that none stays in the inbox
            raise ConfigError(refused[0])
        return found

    def holds(self, key: Key) -> bool:
        """Whether `take` would return at once."""
        return self.recovery.inbox.holds(key)

    def replied(self, position: int, kind: EdgeKind) -> bool:
        """Whether `replies` would return at once."""
        return all(self.holds(Key(edge, position)) for edge in self.plan.edges(kind))

    def call(self, ask: Callable[[Cluster], T]) -> T:
        """Call a function with the present cluster, and again with the next one if workers fail."""

        def waiting() -> T:
            with self.cluster.waiting():
                return ask(self.cluster)

        return self.recovery.through(waiting)


def _close(life: Lifecycle) -> None:
    """End the workers; called by the garbage collector or at the interpreter's end."""
    # The collector may run on any thread, also on one that `Lifecycle.close` waits for.
    if threading.current_thread() is threading.main_thread():
        life.close()
    else:
        threading.Thread(target=life.close, name="close", daemon=True).start()
