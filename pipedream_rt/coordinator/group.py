"""The workers as the coordinator sees them, one generation after another.

`take` waits for what a stage sends. When a worker fails meanwhile, the group ends what is left of
the workers, starts others, gives them the state of the last origin and feeds them what was fed
since (`feed_log.py`), and goes on waiting. The same feed gives the same bits, and the inbox drops
what the coordinator has taken before, so that the caller sees no difference but the time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from pipedream_rt.checkpoint import Manifest, newest_good
from pipedream_rt.cluster.base import Cluster, Fail
from pipedream_rt.coordinator.feed_log import Entry, FeedLog, Origin, Role
from pipedream_rt.coordinator.reception import Reception
from pipedream_rt.coordinator.recovery import Failures, Restart, is_passing
from pipedream_rt.coordinator.status import Status, StatusServer
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import CheckpointError, ConfigError, MessageTimeout, PipelineClosed
from pipedream_rt.lifecycle import Lifecycle
from pipedream_rt.messages.inbox import Inbox
from pipedream_rt.messages.message import (
    Command,
    CommandName,
    Key,
    Message,
    MicroBatch,
    Mode,
    Payload,
    Reply,
    Saved,
    Send,
    Start,
    Target,
)
from pipedream_rt.messages.tree import flat_copy, flatten, unflatten
from pipedream_rt.schedules import COORDINATOR, EdgeKind, Plan
from pipedream_rt.schedules.plan import Address
from pipedream_rt.transport.base import Receive, sender

T = TypeVar("T")

_log = logging.getLogger(__name__)

_generations = itertools.count(1)
"""Groups of this process so far: torch RPC keeps some state for the life of a process too."""

StartCluster = Callable[[Receive, Fail, int], Cluster]
"""``start(receive, fail, generation)``."""

Addressed = tuple[Address, Payload, tuple[Tensor, ...]]
"""To which address, what it says, what it carries."""


def restore_argument(folder: Path, manifest: Manifest, floor: int | None = None) -> dict[str, Any]:
    """Return what `restore_stage` is called with.

    Args:
        folder: Of the checkpoint.
        manifest: Its own.
        floor: Oldest weight version to be read; None for what the checkpoint says.
    """
    return {
        "folder": str(folder),
        "step": manifest.step,
        "plain": manifest.plain,
        "floor": manifest.floor if floor is None else floor,
    }


class WorkerGroup:
    """Workers that host the stages; used by the coordinator's thread alone, but for its end.

    Args:
        plan: What runs where.
        start: Starts a cluster.
        specs: Pickled `StageSpec` of every stage.
        timeout: For an answer that is sure to come.
        failures: Says whether to go on after a failure.
        forks: Closed when all is over.

    Attributes:
        plan: As above.
        life: Of the pipeline: an error that cannot be helped ends it, with all workers.
        at_end: Called when all is over, before the workers are ended.
        position: Of what is fed next.
        log: What was fed since the last origins.
        restarts: The recoveries so far.
        next_micro_batch: One past the last that was fed to be trained on.
        next_loss: Micro-batch whose loss is to be taken next.
    """

    def __init__(
        self,
        plan: Plan,
        start: StartCluster,
        specs: list[Tensor],
        timeout: timedelta,
        failures: Failures,
        close_forks: Callable[[], object],
    ) -> None:
        """Start the workers and give them their stages."""
        self.plan = plan
        self._close_forks = close_forks
        self._start_cluster = start
        self._specs = specs
        self._digests = [hashlib.sha256(spec.numpy().data).digest() for spec in specs]
        self._timeout = timeout
        self._failures = failures
        self._optimizer = b""
        self._training: bool | None = None
        self._owner_pid = os.getpid()
        self.life = Lifecycle("the pipeline", self._end)
        self.at_end: list[Callable[[], object]] = []
        self.position = self.next_micro_batch = self.next_loss = 0
        self._first_position = 0  # of the feed of this generation
        self.log = FeedLog(on=failures.left > 0)
        self.restarts: list[Restart] = []
        self._reception = Reception()
        self._cluster: Cluster | None = None
        self._send: Send = lambda *_: None
        self._status_server: StatusServer | None = None
        with self.life.guard():
            self._begin(self.log.origins[-1])
            if self.cluster.status():
                self._status_server = StatusServer(self.status)

    # -- what is fed ----------------------------------------------------------------------------

    def feed(
        self,
        head: MicroBatch,
        tensors: tuple[Tensor, ...],
        target: Target | None = None,
        target_tensors: tuple[Tensor, ...] = (),
    ) -> int:
        """Feed a micro-batch; it is fed again in later generations.

        Args:
            head: What it is.
            tensors: Of its input.
            target: What its loss compares with; None where no loss is asked for.
            target_tensors: Of that.

        Returns:
            Its position.

        Raises:
            TransportError: It cannot be written.
            PipelineClosed: The pipeline is closed.
        """
        self.life.check()
        with self.life.guard():  # a position must never be used half
            self._feed(Role.ENTRY, head, tensors)
            if target is not None:
                self._feed(Role.TARGET, target, target_tensors)
            if head.mode is Mode.TRAIN:
                self.next_micro_batch = head.micro_batch + 1
            self.position += 1
        return self.position - 1

    def tell(self, name: CommandName, argument: object = None, role: Role = Role.EVERY) -> int:
        """Feed a command to every stage; it is fed again in later generations.

        Args:
            name: Which.
            argument: The same for every stage; with ``Role.OWN``, a dictionary of which each stage
                gets the entries that are named in its layers.
            role: See there.

        Returns:
            Its position, for `replies`.

        Raises:
            PipelineClosed: The pipeline is closed.
        """
        self.life.check()
        with self.life.guard():
            structure, tensors = flat_copy(argument)
            self._feed(role, Command(name=name, structure=structure), tensors)
            if name is CommandName.OPTIMIZER:
                self._optimizer = unflatten(structure, tensors)
            if name is CommandName.TRAINING:
                self._training = unflatten(structure, tensors)
            self.position += 1
        return self.position - 1

    def command(self, name: CommandName, argument: object = None, role: Role = Role.EVERY) -> Any:
        """Feed a command and wait for what every stage replies; see `tell`."""
        return self.replies(self.tell(name, argument, role))

    def _feed(
        self, role: Role, payload: MicroBatch | Command | Target, tensors: tuple[Tensor, ...]
    ) -> None:
        """Send something at the position of now, and keep it for later generations."""
        entry = Entry(role, self.position, payload, tensors)
        self._send_entry(entry)
        self.log.append(entry)

    def _send_entry(self, entry: Entry) -> None:
        """Send what was fed to the stages whose role it is for, by the plan of now."""
        for address, payload, tensors in self._addressed(entry):
            self._send(address, entry.position, payload, tensors)

    def _addressed(self, entry: Entry) -> Iterator[Addressed]:
        """Yield what goes where. The turn of an item counts the feed of this generation."""
        role, position, payload, tensors = entry
        if isinstance(payload, Target):
            for stage in self.plan.exits:
                yield stage, payload, tensors
            return
        payload = dataclasses.replace(payload, turn=position - self._first_position)
        if role is Role.OWN:
            for stage, own in enumerate(self.plan.part(unflatten(payload.structure, tensors))):
                structure, of_stage = flatten(own)
                part = dataclasses.replace(payload, structure=structure)
                yield stage, part, tuple(of_stage)
            return
        stages = self.plan.entries if role is Role.ENTRY else range(self.plan.num_stages)
        for stage in stages:
            yield stage, payload, tensors

    # -- what is taken --------------------------------------------------------------------------

    def take(self, key: Key) -> Message:
        """Wait for a message, through as many recoveries as it takes.

        Raises:
            BaseException: A failure from which the run cannot recover, which ends the pipeline.
        """
        self.life.check()
        with self.life.guard():
            return self._recovering(lambda: self._wait(key))

    def replies(self, position: int, kind: EdgeKind = EdgeKind.REPLY) -> list[Any]:
        """Wait for what every stage replies to the command at a position.

        Args:
            position: Of the command.
            kind: On which edges the replies come; those to `CommandName.SAVE` have their own.
        """
        found = []
        for edge in self.plan.edges(kind):
            message = self.take(Key(edge, position))
            assert isinstance(message.payload, Reply | Saved)
            found.append(unflatten(message.payload.structure, message.tensors))
        return found

    def replied(self, position: int, kind: EdgeKind) -> bool:
        """Whether `replies` would return at once."""
        return all(self.inbox.holds(Key(edge, position)) for edge in self.plan.edges(kind))

    def call(self, ask: Callable[[Cluster], T]) -> T:
        """Ask something of the cluster of now, as references to what its workers hold."""

        def waiting() -> T:
            with self.cluster.waiting():
                return ask(self.cluster)

        self.life.check()
        with self.life.guard():
            return self._recovering(waiting)

    def origin(self) -> Origin:
        """The point after what was fed last, without its folder."""
        return Origin(position=self.position, optimizer=self._optimizer, training=self._training)

    @property
    def inbox(self) -> Inbox:
        """Where messages to the coordinator arrive."""
        return self._reception.inbox

    @property
    def generation(self) -> int:
        """Of the workers of now."""
        return self._reception.generation

    @property
    def cluster(self) -> Cluster:
        """The workers of now."""
        assert self._cluster is not None
        return self._cluster

    @property
    def is_idle(self) -> bool:
        """Whether workers are there, nobody waits for them, and they are this process's own."""
        alone = os.getpid() == self._owner_pid and not self.inbox.busy
        return alone and self.life.is_open and self.inbox.reason is None

    def _end(self) -> None:
        """End all workers; once, from any thread. A forked child must not end its parent's."""
        if os.getpid() != self._owner_pid:
            return
        for at_end in self.at_end:
            at_end()
        self.inbox.close(PipelineClosed("the pipeline was closed"))
        if self._cluster is not None:
            self._cluster.close()
        self._close_forks()
        if self._status_server is not None:
            self._status_server.close()

    def status(self) -> Status:
        """What `pipedream-rt status` shows. From any thread."""
        return {
            "pid": os.getpid(),
            "ns": time.monotonic_ns(),
            "schedule": self.plan.name,
            "generation": self.generation,
            "restarts": len(self.restarts),
            "losses": self.next_loss,
            "fed": self.next_micro_batch,
            "workers": self.cluster.status(),
        }

    def _wait(self, key: Key) -> Message:
        """Wait for a message; tell of every stage if it does not come."""
        with self.cluster.waiting():
            try:
                return self.inbox.take(key, Deadline(self._timeout))
            except MessageTimeout as error:
                stories = "\n".join(self.cluster.stories())
                raise MessageTimeout(f"{error}\n{stories}") from None

    # -- recovery -------------------------------------------------------------------------------

    def _recovering(self, attempt: Callable[[], T]) -> T:
        """Do something that fails with the workers, again with others where that can help."""
        while True:
            try:
                return attempt()
            except Exception as error:
                if self.life.is_over:
                    raise
                known = self._reception.failure
                # What is known to have failed says more than how it was noticed here.
                self._recover(known if known is not None and is_passing(error) else error)

    def _recover(self, error: BaseException) -> None:
        """Go on with new workers.

        Raises:
            BaseException: The failure, or one that came after it, if that cannot help.
        """
        noticed, failure = time.monotonic(), error
        while True:
            self._failures.note(failure, range(self.next_loss, self.next_micro_batch))
            _log.warning(
                "%s\nstarting new workers; %d more failures will be recovered from",
                failure,
                self._failures.left,
            )
            try:
                replayed = self._start_again()
                break
            except (CheckpointError, ConfigError) as again:
                # There is nothing to go back to, or nobody to start.
                raise error from again
            except Exception as again:
                if self.life.is_over:
                    raise
                failure = self._reception.failure or again
        restart = Restart(
            generation=self.generation,
            reason=str(error).splitlines()[0],
            seconds=time.monotonic() - noticed,
            replayed=replayed,
        )
        self.restarts.append(restart)
        if not self._failures.left:
            self.log.stop()  # there will be no other recovery
        _log.warning(
            "recovered in %.1f s: generation %d, %d micro-batches are computed again",
            restart.seconds,
            restart.generation,
            restart.replayed,
        )

    def _start_again(self) -> int:
        """End the workers, start others and bring them to where the feed is.

        Returns:
            How many micro-batches are fed again.
        """
        self.cluster.kill()
        origin, manifest = self._origin_to_use()
        self._begin(origin, manifest)
        replayed = 0
        for entry in self.log.since(origin):
            self._send_entry(entry)
            replayed += entry.role is Role.ENTRY
        return replayed

    def _origin_to_use(self) -> tuple[Origin, Manifest | None]:
        """The newest origin whose checkpoint is whole, with what that says of itself.

        Raises:
            CheckpointError: None is.
        """
        while True:
            origin = self.log.origins[-1]
            if origin.folder is None:
                return origin, None
            try:
                return origin, newest_good(origin.folder)[1]
            except CheckpointError as error:
                if len(self.log.origins) == 1:
                    raise
                _log.warning("%s; going back to the one before", error)
                self.log.origins.pop()

    def _begin(self, origin: Origin, manifest: Manifest | None = None) -> None:
        """Start workers and wait until each stage has the state of an origin."""
        generation = next(_generations)
        reception = self._reception
        reception.begin(generation)
        self._cluster = self._start_cluster(
            reception.receive, reception.fail_of(generation), generation
        )
        if self.life.is_over:  # meanwhile, by a signal handler
            self._cluster.close()
            raise PipelineClosed("the pipeline was closed")
        reception.cluster = self._cluster
        self._send = sender(self._cluster.transport, COORDINATOR, generation)
        self._first_position = origin.position
        restore = None
        if origin.folder is not None and manifest is not None:
            restore = restore_argument(origin.folder, manifest, origin.floor)
        parts = zip(self.plan.edges(EdgeKind.START), self._specs, self._digests, strict=True)
        for edge, spec, digest in parts:
            start = Start(
                digest=digest,
                optimizer=origin.optimizer,
                training=origin.training,
                restore=restore,
                announced=self.next_micro_batch,
            )
            self._send(edge.target, 0, start, (spec,))
        for edge in self.plan.edges(EdgeKind.READY):
            self._wait(Key(edge, generation))


class Lease:
    """Keeps the workers: they end when nobody holds it any more, or the interpreter ends.

    Whatever a user can hold that needs the workers holds it too: the pipeline, a pending step, the
    handle of a stage, the optimizer.

    Args:
        group: Whose workers end then.

    Attributes:
        group: As above.
    """

    def __init__(self, group: WorkerGroup) -> None:
        """Watch over itself."""
        self.group = group
        end = weakref.finalize(self, _close, group)
        group.at_end.append(end.detach)


def _close(group: WorkerGroup) -> None:
    """End the workers; called by the garbage collector or at the interpreter's end.

    The collector may run on any thread, also on one that closing waits for, hence the thread.
    """
    if threading.current_thread() is threading.main_thread():
        group.life.close()
    else:
        threading.Thread(target=group.life.close, name="close", daemon=True).start()
