"""The workers that host the stages, one generation after another.

When a worker fails, the others are ended, and new ones are started. They get the state of the
newest restore point, and the feed since then once more. The same feed gives the same bits, and the
inbox drops messages that the coordinator has already taken, so whoever waits for a message notices
nothing but the time.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from pipedream_rt.batches.forwards import Forwards
from pipedream_rt.checkpoint import Manifest, newest_good
from pipedream_rt.cluster.interface import Cluster, Fail
from pipedream_rt.cluster.subprocesses import Backoff
from pipedream_rt.coordinator.recovery.coordinator_inbox import CoordinatorInbox
from pipedream_rt.coordinator.recovery.decision import (
    Failures,
    Grown,
    Restart,
    is_passing,
    is_passing_at_start,
)
from pipedream_rt.coordinator.recovery.feed import Feed
from pipedream_rt.coordinator.recovery.feed_log import RestorePoint
from pipedream_rt.coordinator.recovery.status_server import Status, StatusServer
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import (
    CheckpointError,
    ConfigError,
    MessageTimeout,
    PipelineClosed,
    PipelineError,
)
from pipedream_rt.lifecycle import Lifecycle
from pipedream_rt.messages.inbox import Wanted
from pipedream_rt.messages.message import Failed, Key, Message, Start, digest_of
from pipedream_rt.schedules import EdgeKind, Plan
from pipedream_rt.telling import log_of
from pipedream_rt.transport.interface import GenerationSender, Receive

T = TypeVar("T")

_log = log_of(__name__)

_generations = itertools.count(1)
"""Numbers of the generations, of all pipelines of this process.

No number may come twice, because torch RPC keeps some state until the process ends.
"""

StartCluster = Callable[[Receive, Fail, int], Cluster]
"""``start(receive, fail, generation)`` starts the workers of a generation.

The cluster calls ``receive`` with each message to the coordinator, and ``fail`` with the reason
when its workers cannot go on.
"""


def restore_argument(
    folder: Path, manifest: Manifest, floor: int | None = None, with_optimizer: bool = True
) -> dict[str, Any]:
    """Return the arguments with which a stage calls `restore_stage`."""
    return {
        "folder": str(folder),
        "files": list(manifest.files),
        "step": manifest.step,
        "plain": manifest.plain,
        "floor": manifest.floor if floor is None else floor,
        "with_optimizer": with_optimizer,
    }


class Recovery:
    """The workers of the present generation, and how the next one begins.

    Attributes:
        life: The life of the pipeline. An error that is not recovered from ends it.
        feed: The feed of the workers.
        cluster: The workers of the present generation.
        inbox: The coordinator's, of all generations.
        restarts: The recoveries so far.
        next_loss: Number of the next micro-batch whose loss is to be taken.
        is_at_work: Whether a generation is being ended and the next one begun.
        before_workers_end: Functions to call when the pipeline ends, before the workers do.
        after_workers_end: Functions to call when the workers have ended.
    """

    cluster: Cluster

    def __init__(
        self,
        plan: Plan,
        start: StartCluster,
        specs: list[tuple[Tensor, ...]],
        forwards: Forwards,
        timeout: timedelta,
        failures: Failures,
    ) -> None:
        self.plan = plan
        self.life = Lifecycle("the pipeline", self._end)
        self.feed = Feed(plan, forwards, self.life, logged=failures.left > 0)
        self._start_cluster = start
        self._specs = specs  # by stage, each pickled
        self._digests = [digest_of(spec) for spec in specs]
        self._timeout = timeout
        self._failures = failures
        self._receiver = CoordinatorInbox(plan)
        self.inbox = self._receiver.inbox
        self.restarts: list[Restart] = []
        self.next_loss = 0
        self.is_at_work = False
        self._looked_at = self.feed.log.restore_points[-1]
        self._status_server: StatusServer | None = None
        self._owner_pid = os.getpid()
        self.before_workers_end: list[Callable[[], object]] = []
        self.after_workers_end: list[Callable[[], object]] = []

    @property
    def generation(self) -> int:
        return self._receiver.generation

    def begin(self) -> None:
        """Start the first generation of workers; those that are lost meanwhile are replaced."""
        with self.life.guard("its workers were started"):
            try:
                self._begin(self._looked_at, None)
            except Exception as error:
                known = self._receiver.failure or error
                if not is_passing_at_start(known):
                    raise
                self._go_on(known)
            if self.cluster.status():
                self._status_server = StatusServer(self._status)

    def _end(self) -> None:
        """End all workers; called once, from any thread. A forked child ends none."""
        if os.getpid() != self._owner_pid:
            return
        # An ExitStack, so that every step happens, whatever happens in the one before it. The steps
        # happen in the reverse order of the lines below: read them upwards.
        with ExitStack() as steps:
            if self._status_server is not None:
                steps.callback(self._status_server.close)
            for after_workers_end in self.after_workers_end:
                steps.callback(after_workers_end)
            if hasattr(self, "cluster"):
                steps.callback(self.cluster.close)
            steps.callback(self.inbox.close, PipelineClosed("the pipeline was closed"))
            for before_workers_end in self.before_workers_end:
                steps.callback(before_workers_end)

    @property
    def is_idle(self) -> bool:
        """Whether the workers run, no thread waits for them, and this process started them."""
        alone = os.getpid() == self._owner_pid and not self.inbox.busy and not self.is_at_work
        return alone and self.life.is_open and self.inbox.reason is None

    def _status(self) -> Status:
        """Return the record that `pipedream-rt status` shows. Any thread may call it."""
        return {
            "pid": os.getpid(),
            "ns": time.monotonic_ns(),
            "schedule": self.plan.name,
            "generation": self.generation,
            "restarts": len(self.restarts),
            "losses": self.next_loss,
            "fed": self.feed.next_micro_batch,
            "workers": self.cluster.status(),
        }

    def wait(self, key: Key) -> Message:
        """Wait for a message of this generation."""
        with self.cluster.waiting():
            try:
                return self.inbox.take(Wanted(key, Deadline(self._timeout)))
            except MessageTimeout as error:
                stories = "\n".join(self.cluster.stories())
                raise MessageTimeout(f"{error}\n{stories}") from None

    def tell_parts(self, part: Callable[[int], str]) -> None:
        """Let errors of stages say what part of a mini-batch they had; see `CoordinatorInbox`."""
        self._receiver.part = part

    def error_of(self, failed: Failed) -> BaseException:
        """Return the error to raise for what has ended an evaluation or inference."""
        return self._receiver.error_of(failed)

    # -- from one generation to the next ----------------------------------------------------------

    def take(self, key: Key, again: bool = False) -> Message:
        """Wait for a message, through as many recoveries as that needs.

        ``again``: whether the caller can wait for it once more. Then the pipeline stays open if a
        signal handler raises something meanwhile.
        """
        return self.through(lambda: self.wait(key), lambda: again and not self.inbox.has_taken(key))

    def through(self, attempt: Callable[[], T], is_undone: Callable[[], bool] = lambda: False) -> T:
        """Call a function, and after a failure of the workers recover and call it again.

        ``is_undone``: whether the attempt has changed nothing, so that something from outside, as
        of a signal handler, may end it.
        """
        self.life.check()
        spared = False
        with self.life.guard("the script waited for the stages", lambda: spared):
            while True:
                try:
                    return attempt()
                except Exception as error:
                    if self.life.is_over:
                        raise
                    # The inbox knows what failed; the error only tells how it was noticed.
                    known = self._receiver.failure
                    # Else it is an answer, or of a second thread, which finds the inbox in use.
                    foreign = not isinstance(error, PipelineError) and not self.inbox.busy
                    if foreign and error is not known and not is_passing(error) and is_undone():
                        spared = True
                        raise
                    self._go_on(known if known is not None and is_passing(error) else error)

    def grow(self) -> None:
        """Give workers that have come meanwhile their part of the work, once per checkpoint."""
        log = self.feed.log
        if not log.on:
            return
        with self.life.guard("the work was divided anew"):
            count, restore_point = self.cluster.newcomers(), log.restore_points[-1]
            if restore_point is self._looked_at:
                return
            self._looked_at = restore_point
            if not count:
                return
            try:
                self._restore_point_to_use()
            except CheckpointError as error:
                _log.warning(
                    "more workers have come, and the work cannot be divided anew: %s", error
                )
                return
            more = "another" if count == 1 else f"{count} more"
            are = "process has" if count == 1 else "processes have"
            # A recovery without a failure, right behind a new restore point: little is fed again.
            self._go_on(Grown(f"{more} worker {are} come"))

    def _go_on(self, reason: BaseException) -> None:
        """End this generation and begin the next one, or raise if the run cannot go on."""
        noticed, failure, pauses = time.monotonic(), reason, Backoff()
        with self._at_work():
            while True:
                began = time.monotonic()
                self._note(failure)
                try:
                    self._refuse_if_over()
                    restore_point, manifest = self._restore_point_to_use()
                    if hasattr(self, "cluster"):
                        self.cluster.kill()
                    self._begin(restore_point, manifest)
                    replayed = self.feed.again(restore_point)
                    break
                except (CheckpointError, ConfigError) as again:
                    if not is_passing(again):
                        # There is no checkpoint to go back to, or no worker can be started.
                        raise again if isinstance(reason, Grown) else reason from again
                    failure = again
                except Exception as again:
                    if self.life.is_over:
                        raise PipelineClosed("the pipeline was closed") from again
                    failure = self._receiver.failure or again
                # What makes the system refuse, or workers end at once, may take a while to pass.
                threading.Event().wait(pauses.after("", time.monotonic() - began))
        restart = Restart(
            generation=self.generation,
            reason=(str(reason) or type(reason).__name__).splitlines()[0],
            seconds=time.monotonic() - noticed,
            replayed=replayed,
        )
        self.restarts.append(restart)
        if not self._failures.left:
            self.feed.log.stop()  # there will be no other recovery
        _log.warning(
            "recovered in %.1f s: generation %d, %d micro-batches are computed again",
            restart.seconds,
            restart.generation,
            restart.replayed,
        )

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """While in the body, `close` from a signal handler does not wait."""
        self.is_at_work = True
        try:
            yield
        finally:
            self.is_at_work = False

    def _note(self, failure: BaseException) -> None:
        """Count a failure, and log it; raise if the run cannot go on."""
        if isinstance(failure, Grown):
            _log.warning("%s; the work is divided anew", failure)
            return
        self._failures.note(failure, range(self.next_loss, self.feed.next_micro_batch))
        _log.warning(
            "%s\nstarting new workers; %d more failures will be recovered from",
            failure,
            self._failures.left,
        )

    def _restore_point_to_use(self) -> tuple[RestorePoint, Manifest | None]:
        """Return the newest restore point with a whole checkpoint, and that one's manifest."""
        restore_points = self.feed.log.restore_points
        while True:
            restore_point = restore_points[-1]
            if restore_point.folder is None:
                return restore_point, None
            try:
                manifest = newest_good(restore_point.folder)[1]
                if manifest.run != restore_point.run:
                    raise CheckpointError(
                        f"{restore_point.folder} was made by another run meanwhile"
                    )
                return restore_point, manifest
            except CheckpointError as error:
                if len(restore_points) == 1:
                    raise
                _log.warning("%s; the run goes back to the restore point before it", error)
                restore_points.pop()

    def _refuse_if_over(self) -> None:
        """Refuse to go on where a signal handler has closed the pipeline meanwhile."""
        if self.life.is_over:
            raise PipelineClosed("the pipeline was closed")

    def _begin(self, restore_point: RestorePoint, manifest: Manifest | None) -> None:
        """Start a generation of workers; wait until stages have the state of a restore point."""
        self._refuse_if_over()
        generation, receiver = next(_generations), self._receiver
        receiver.begin(generation)
        self.cluster = self._start_cluster(
            receiver.receive, receiver.fail_of(generation), generation
        )
        try:
            self._refuse_if_over()  # what ended the pipeline meanwhile did not know these workers
        except PipelineClosed:
            self.cluster.close()
            raise
        receiver.cluster = self.cluster
        send = GenerationSender(self.cluster.transport, generation)
        definitions = self.feed.begin(send)
        restore = None
        if restore_point.folder is not None and manifest is not None:
            restore = restore_argument(
                restore_point.folder, manifest, restore_point.floor, restore_point.with_optimizer
            )
        for edge in self.plan.edges(EdgeKind.START):
            stage = self.plan.stage_of(edge.target)
            start = Start(
                digest=self._digests[stage],
                optimizer=restore_point.optimizer,
                training=dict(restore_point.apart).get(stage, restore_point.training),
                restore=restore,
                # Actions that may be done again are announced: which one kills a worker is known.
                announced=self.feed.next_micro_batch,
                definitions=definitions,
            )
            send(Key(edge, 0), start, self._specs[stage])
        for edge in self.plan.edges(EdgeKind.READY):
            self.wait(Key(edge, generation))
