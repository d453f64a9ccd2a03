"""The workers as the coordinator sees them, one generation after another.

`take` waits for what a stage sends. When a worker fails meanwhile, it ends what is left of the
workers, starts others, gives them the state of the last origin and feeds them what was fed since
(`feed.py`), and goes on waiting. The same positions give the same bits, and the inbox drops what
the coordinator has taken before, so that the caller sees no difference but the time.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from pipedream_rt.checkpoint import Manifest, newest_good
from pipedream_rt.cluster.base import Cluster, Fail
from pipedream_rt.coordinator.feed_log import Entry, FeedLog, Origin
from pipedream_rt.coordinator.reception import Reception
from pipedream_rt.coordinator.recovery import Failures, Restart, is_passing
from pipedream_rt.coordinator.status import Status, StatusServer
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import CheckpointError, ConfigError, MessageTimeout, PipelineClosed
from pipedream_rt.messages.inbox import Inbox
from pipedream_rt.messages.message import (
    COORDINATOR,
    Channel,
    Command,
    CommandName,
    Job,
    Key,
    Message,
    MicroBatch,
    Mode,
    Payload,
    Reply,
    Saved,
    Send,
)
from pipedream_rt.messages.tree import flat_copy, unflatten
from pipedream_rt.transport.base import Receive, sender

T = TypeVar("T")

_log = logging.getLogger(__name__)

_generations = itertools.count(1)
"""Groups of this process so far: torch RPC keeps some state for the life of a process too."""

StartCluster = Callable[[Receive, Fail, int], Cluster]
"""``start(receive, fail, generation)``."""


def load_argument(folder: Path, manifest: Manifest, floor: int | None = None) -> dict[str, Any]:
    """What `Stage.load` is called with.

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
    """Workers that host the stages; used by the coordinator's thread alone, but for `close`.

    Args:
        start: Starts a cluster.
        jobs: Pickled `StageJob` of every stage.
        timeout: For an answer that is sure to come.
        failures: Says whether to go on after a failure.
        name: Of the schedule.
        at_close: Called when all is over.

    Attributes:
        name: As above.
        position: Of what is fed next.
        log: What was fed since the last origins.
        restarts: The recoveries so far.
        next_micro_batch: One past the last that was fed to be trained on.
        next_loss: Micro-batch whose loss is to be taken next.
    """

    def __init__(
        self,
        start: StartCluster,
        jobs: list[Tensor],
        timeout: timedelta,
        failures: Failures,
        name: str,
        at_close: Callable[[], object],
    ) -> None:
        """Start the workers and give them their stages."""
        self.name = name
        self._at_close = at_close
        self._start_cluster = start
        self._jobs = jobs
        self._digests = [hashlib.sha256(job.numpy().data).digest() for job in jobs]
        self._timeout = timeout
        self._failures = failures
        self._optimizer = b""
        self._training: bool | None = None
        self._closed = False
        self.position = self.next_micro_batch = self.next_loss = 0
        self.log = FeedLog(on=failures.left > 0)
        self.restarts: list[Restart] = []
        self._reception = Reception()
        self._cluster: Cluster | None = None
        self._send: Send = lambda *_: None
        self._status_server: StatusServer | None = None
        try:
            self._begin(self.log.origins[-1])
        except BaseException:
            self.close()
            raise
        if self.cluster.status():
            self._status_server = StatusServer(self.status)

    # -- what is sent and taken -----------------------------------------------------------------

    def feed(self, to: int, payload: Payload, tensors: tuple[Tensor, ...] = ()) -> None:
        """Send to a stage at the position of now; again in later generations.

        Raises:
            TransportError: It cannot be written.
        """
        self._send(to, self.position, payload, tensors)
        self.log.append(Entry(to, self.position, payload, tensors))
        match payload:
            case MicroBatch(mode=Mode.TRAIN) as fed:
                self.next_micro_batch = fed.micro_batch + 1
            case Command(name=CommandName.OPTIMIZER):
                self._optimizer = unflatten(payload.structure, tensors)
            case Command(name=CommandName.TRAINING):
                self._training = unflatten(payload.structure, tensors)

    def advance(self) -> None:
        """Go on to the next position."""
        self.position += 1

    def take(self, key: Key) -> Message:
        """Wait for a message, through as many recoveries as it takes.

        Raises:
            BaseException: A failure from which the run cannot recover.
        """
        return self._recovering(lambda: self._wait(key))

    def tell(self, name: CommandName, *arguments: object) -> int:
        """Feed a command to every stage at the position of now.

        Args:
            name: Which.
            *arguments: One for all stages, or one for each.

        Returns:
            The position, for `replies`.
        """
        stages = len(self._jobs)
        each = arguments if len(arguments) == stages else (arguments or (None,)) * stages
        for stage, argument in enumerate(each):
            structure, tensors = flat_copy(argument)
            self.feed(stage, Command(name=name, structure=structure), tensors)
        self.advance()
        return self.position - 1

    def replies(self, position: int, channel: Channel = Channel.REPLY) -> list[Any]:
        """Wait for what every stage replies to the command at a position.

        Args:
            position: Of the command.
            channel: Where the replies come; those of `CommandName.SAVE` have their own.
        """
        found = []
        for stage in range(len(self._jobs)):
            message = self.take(Key(channel, position, stage))
            assert isinstance(message.payload, Reply | Saved)
            found.append(unflatten(message.payload.structure, message.tensors))
        return found

    def replied(self, position: int, channel: Channel) -> bool:
        """Whether `replies` would return at once."""
        return all(
            self.inbox.holds(Key(channel, position, stage)) for stage in range(len(self._jobs))
        )

    def call(self, ask: Callable[[Cluster], T]) -> T:
        """Ask something of the cluster of now, as references to what its workers hold."""

        def waiting() -> T:
            with self.cluster.waiting():
                return ask(self.cluster)

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

    def close(self) -> None:
        """End all workers. Idempotent, from any thread."""
        self._closed = True
        self.inbox.close(PipelineClosed("the pipeline was closed"))
        if self._cluster is not None:
            self._cluster.close()
        self._at_close()
        if self._status_server is not None:
            self._status_server.close()

    def status(self) -> Status:
        """What `pipedream-rt status` shows. From any thread."""
        return {
            "pid": os.getpid(),
            "ns": time.monotonic_ns(),
            "schedule": self.name,
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
                if self._closed:
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
                if self._closed:
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
        for to, position, payload, tensors in self.log.since(origin):
            self._send(to, position, payload, tensors)
            replayed += to == 0 and isinstance(payload, MicroBatch)
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
        if self._closed:  # meanwhile, by a signal handler
            self._cluster.close()
            raise PipelineClosed("the pipeline was closed")
        reception.cluster = self._cluster
        self._send = sender(self._cluster.transport, COORDINATOR, generation)
        restore = None
        if origin.folder is not None and manifest is not None:
            restore = load_argument(origin.folder, manifest, origin.floor)
        for stage, (job, digest) in enumerate(zip(self._jobs, self._digests, strict=True)):
            start = Job(
                digest=digest,
                position=origin.position,
                optimizer=origin.optimizer,
                training=origin.training,
                restore=restore,
                announced=self.next_micro_batch,
            )
            self._send(stage, 0, start, (job,))
        for stage in range(len(self._jobs)):
            self._wait(Key(Channel.READY, generation, stage))
