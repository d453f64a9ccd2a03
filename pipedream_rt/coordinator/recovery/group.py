"""The workers that host a pipeline's stages, one generation after another.

`take` waits for a message from a stage. When a worker fails meanwhile, the group ends the workers
that are left, starts new ones, gives them the state of the newest restore point, feeds them what
was fed since (`feed_log.py`), and goes on waiting. The same feed gives the same bits, and the inbox
drops messages that the coordinator has already taken, so the caller notices nothing but the time.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from pipedream_rt.batches.forwards import Forwards
from pipedream_rt.checkpoint import Manifest, newest_good
from pipedream_rt.cluster.interface import Cluster, Fail
from pipedream_rt.cluster.subprocesses import Backoff
from pipedream_rt.coordinator.recovery.coordinator_inbox import CoordinatorInbox
from pipedream_rt.coordinator.recovery.decision import Failures, Grown, Restart, is_passing
from pipedream_rt.coordinator.recovery.feed_log import Entry, FeedLog, RestorePoint, Role
from pipedream_rt.coordinator.recovery.status_server import Status, StatusServer
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import CheckpointError, ConfigError, MessageTimeout, PipelineClosed
from pipedream_rt.lifecycle import Lifecycle
from pipedream_rt.messages.inbox import Inbox, Wanted
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
    digest_of,
)
from pipedream_rt.messages.tree import flat_copy, flatten, unflatten
from pipedream_rt.schedules import COORDINATOR, EdgeKind, Plan
from pipedream_rt.schedules.edges import Address
from pipedream_rt.transport.interface import Receive, Sender

T = TypeVar("T")

_log = logging.getLogger(__name__)

_generations = itertools.count(1)
"""Numbers of the generations, of all pipelines of this process.

No number may come twice, because torch RPC keeps some state until the process ends.
"""

StartCluster = Callable[[Receive, Fail, int], Cluster]
"""``start(receive, fail, generation)`` starts the workers of a generation.

The cluster calls ``receive`` with each message to the coordinator, and ``fail`` with the reason
when its workers cannot go on.
"""

Addressed = tuple[Address, Payload, tuple[Tensor, ...]]


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


_TOUCHING = (
    CommandName.LOAD, CommandName.LOAD_STATE, CommandName.LOAD_OPTIMIZER_STATE, CommandName.CALL,
    CommandName.METHOD,
)  # fmt: skip
"""The commands that may change weights or optimizers."""


class WorkerGroup:
    """The workers that host the stages, what they are fed, and their recovery.

    One thread, the coordinator's, uses the group; only `status` and the end may come from others.

    Attributes:
        life: The life of the pipeline. An error that the group does not recover from ends it.
        before_workers_end: Functions to call when the pipeline ends, before the workers do.
        after_workers_end: Functions to call when the workers have ended.
        position: Position of the next item of the feed.
        next_micro_batch: Number of the next micro-batch to be fed for training.
        next_loss: Number of the next micro-batch whose loss is to be taken.
        training: The mode that all modules were set to (`Module.train`); None if never.
        apart: The mode that stages were set to by themselves after that, by stage.
        loads: The number of times that weights were loaded.
        touched: Whether stages were told to do what may have changed weights or optimizers.
    """

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
        self._start_cluster = start
        self._specs = specs  # by stage, each pickled
        self._forwards = forwards
        self._digests = [digest_of(spec) for spec in specs]
        self._timeout = timeout
        self._failures = failures
        self._optimizer = b""  # the present `OptimizerSpec`, pickled
        self.training: bool | None = None
        self.apart: dict[int, bool] = {}
        self._owner_pid = os.getpid()
        self.life = Lifecycle("the pipeline", self._end)
        self.before_workers_end: list[Callable[[], object]] = []
        self.after_workers_end: list[Callable[[], object]] = []
        self.position = self.next_micro_batch = self.next_loss = self.loads = 0
        self.touched = False
        # By address, the number of items that it was fed, and the programs that it was given.
        self._turns = [0] * len(plan.addresses)
        self._defined: list[set[int]] = []
        self._route = 0  # the micro-batch by whose number the replicas are chosen
        self._recovers = False
        self.log = FeedLog(on=failures.left > 0)
        self.restarts: list[Restart] = []
        self._coordinator_inbox = CoordinatorInbox(plan)
        self._cluster: Cluster | None = None
        self._send: Send = lambda *_: None
        self._status_server: StatusServer | None = None
        with self.life.guard():
            self._looked_at = self.log.restore_points[-1]
            self._begin(self._looked_at)
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
        """Feed a micro-batch, keep it for recoveries, and return its position."""
        self.life.check()
        with self.life.guard():  # an error between input and target must end the pipeline
            self._feed(Role.ENTRY, head, tensors)
            if target is not None:
                self._feed(Role.TARGET, target, target_tensors)
            if head.mode is Mode.TRAIN:
                self.next_micro_batch = head.micro_batch + 1
            self.position += 1
        return self.position - 1

    def tell(self, name: CommandName, argument: object = None, role: Role = Role.EVERY) -> int:
        """Feed a command, keep it for recoveries, and return its position; wait for no reply."""
        self.life.check()
        structure, tensors = flat_copy(argument)
        with self.life.guard():
            self._feed(role, Command(name=name, structure=structure), tensors)
            if name is CommandName.OPTIMIZER:
                self._optimizer = unflatten(structure, tensors)
            if name is CommandName.TRAINING:
                only, training = unflatten(structure, tensors)
                if only is None:
                    self.training, self.apart = training, {}
                else:
                    self.apart[only] = training
            self.loads += name in (CommandName.LOAD, CommandName.LOAD_STATE)
            self.touched |= name in _TOUCHING
            self.position += 1
        return self.position - 1

    def of_stages(self, replies: Sequence[T]) -> list[T]:
        """Return the replies of replica 0 of each stage, from those of all addresses."""
        return [replies[self.plan.address_of(stage)] for stage in range(self.plan.num_stages)]

    def check_settings_unchanged(self) -> None:
        """Refuse if nobody may wait for the workers now; ask before anything is fed for that."""
        self.life.check()
        self.cluster.check_settings_unchanged()

    def command(self, name: CommandName, argument: object = None, role: Role = Role.EVERY) -> Any:
        """Feed a command as `tell` does, and wait for the replies of all addresses."""
        self.check_settings_unchanged()
        position = self.tell(name, argument, role)
        try:
            return self.replies(position)
        finally:
            if name.leaves_no_trace:
                self.log.forget(position)

    def _feed(
        self, role: Role, payload: MicroBatch | Command | Target, tensors: tuple[Tensor, ...]
    ) -> None:
        """Send an item of the feed at the next position, and keep it for recoveries."""
        entry = Entry(role, self.position, payload, tensors)
        self._send_entry(entry)
        self.log.append(entry)

    def _send_entry(self, entry: Entry) -> None:
        """Send an item of the feed to the addresses that it is for in the present plan."""
        for address, payload, tensors in self._addressed(entry):
            self._send(address, entry.position, payload, tensors)

    def _addressed(self, entry: Entry) -> Iterator[Addressed]:
        """Yield the messages of an item of the feed."""
        role, _, payload, tensors = entry
        plan = self.plan
        if isinstance(payload, Target):  # it follows its micro-batch, on the same route
            for stage in plan.exits:
                yield plan.address_of(stage, self._route), payload, tensors
        elif isinstance(payload, MicroBatch):
            self._route = payload.micro_batch if payload.mode is Mode.TRAIN else 0
            on_its_way = [plan.address_of(stage, self._route) for stage in range(plan.num_stages)]
            turns = [self._next_turn(address) for address in on_its_way]
            known = turns if plan.replicated else []
            payload = self._with_definition(payload, on_its_way)
            for stage, structure, share in self._forwards.shares(payload, tensors):
                wanted = [False] * len(share)
                part = dataclasses.replace(
                    payload,
                    turn=turns[stage],
                    turns=known,
                    structure=structure,
                    requires_grad=wanted,
                )
                yield on_its_way[stage], part, share
        else:
            parts = [(payload.structure, tensors)] * plan.num_stages
            if role is Role.OWN:
                owned = plan.part(unflatten(payload.structure, tensors))
                parts = [(structure, tuple(own)) for structure, own in map(flatten, owned)]
            for address in plan.addresses:
                structure, own = parts[plan.stage_of(address)]
                turn = self._next_turn(address)
                command = dataclasses.replace(payload, turn=turn, structure=structure)
                yield address, command, own

    def _with_definition(self, head: MicroBatch, on_its_way: Sequence[Address]) -> MicroBatch:
        """Add its program to a micro-batch if a replica on its way does not have that yet."""
        definitions = self._forwards.definitions
        number = head.program - self._forwards.first_defined
        # Without replicas, the first micro-batch that follows a program passes all stages with it.
        if not self.plan.replicated or number < 0:
            return head
        missing = [address for address in on_its_way if number not in self._defined[address]]
        for address in missing:
            self._defined[address].add(number)
        return dataclasses.replace(head, definition=definitions[number] if missing else b"")

    def _next_turn(self, address: Address) -> int:
        """Count an item for an address; return how many this generation fed it before."""
        self._turns[address] += 1
        return self._turns[address] - 1

    # -- what is taken --------------------------------------------------------------------------

    def take(self, key: Key) -> Message:
        """Wait for a message, through as many recoveries as that needs."""
        self.life.check()
        with self.life.guard():
            return self._recovering(lambda: self._wait(key))

    def replies(self, position: int, kind: EdgeKind = EdgeKind.REPLY) -> list[Any]:
        """Wait for the replies of all stages, of each replica, to the command at a position."""
        found, refused = [], []
        for edge in self.plan.edges(kind):
            message = self.take(Key(edge, position))
            assert isinstance(message.payload, Reply | Saved)
            found.append(unflatten(message.payload.structure, message.tensors))
            if isinstance(message.payload, Reply) and message.payload.refused:
                refused.append(f"{self.plan.title_of(edge.source)}: {message.payload.refused}")
        if refused:  # raised when all were taken, so that none stays in the inbox
            raise ConfigError(refused[0])
        return found

    def replied(self, position: int, kind: EdgeKind) -> bool:
        """Whether `replies` would return at once."""
        return all(self.inbox.holds(Key(edge, position)) for edge in self.plan.edges(kind))

    def call(self, ask: Callable[[Cluster], T]) -> T:
        """Call a function with the present cluster, and again with the next one if workers fail."""

        def waiting() -> T:
            with self.cluster.waiting():
                return ask(self.cluster)

        self.life.check()
        with self.life.guard():
            return self._recovering(waiting)

    def restore_point(self) -> RestorePoint:
        """Return a restore point behind what was fed last, without a folder."""
        return RestorePoint(
            position=self.position,
            optimizer=self._optimizer,
            training=self.training,
            apart=tuple(self.apart.items()),
        )

    @property
    def inbox(self) -> Inbox:
        return self._coordinator_inbox.inbox

    @property
    def generation(self) -> int:
        return self._coordinator_inbox.generation

    @property
    def cluster(self) -> Cluster:
        """The workers of the present generation."""
        assert self._cluster is not None
        return self._cluster

    @property
    def is_idle(self) -> bool:
        """Whether the workers run, no thread waits for them, and this process started them."""
        alone = os.getpid() == self._owner_pid and not self.inbox.busy and not self._recovers
        return alone and self.life.is_open and self.inbox.reason is None

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
            if self._cluster is not None:
                steps.callback(self._cluster.close)
            steps.callback(self.inbox.close, PipelineClosed("the pipeline was closed"))
            for before_workers_end in self.before_workers_end:
                steps.callback(before_workers_end)

    def status(self) -> Status:
        """Return the record that `pipedream-rt status` shows. Any thread may call it."""
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
        """Wait for a message in this generation."""
        with self.cluster.waiting():
            try:
                return self.inbox.take(Wanted(key, Deadline(self._timeout)))
            except MessageTimeout as error:
                stories = "\n".join(self.cluster.stories())
                raise MessageTimeout(f"{error}\n{stories}") from None

    # -- recovery -------------------------------------------------------------------------------

    def _recovering(self, attempt: Callable[[], T]) -> T:
        """Call a function, and after a failure of the workers recover and call it again."""
        while True:
            try:
                return attempt()
            except Exception as error:
                if self.life.is_over:
                    raise
                known = self._coordinator_inbox.failure
                self._recovers = True  # so that a signal handler that closes waits for nothing
                try:
                    # The inbox knows what failed; the error only tells how it was noticed.
                    self._recover(known if known is not None and is_passing(error) else error)
                finally:
                    self._recovers = False

    def grow(self) -> None:
        """Give workers that have come meanwhile their part of the work, once per checkpoint."""
        if not self.log.on:
            return
        with self.life.guard():
            count, restore_point = self.cluster.newcomers(), self.log.restore_points[-1]
            if restore_point is self._looked_at:
                return
            self._looked_at = restore_point
            # A recovery without a failure, right behind a new restore point: little is fed again.
            if count and self._can_go_back():
                self._recovers = True
                try:
                    more = "another" if count == 1 else f"{count} more"
                    are = "process has" if count == 1 else "processes have"
                    self._recover(Grown(f"{more} worker {are} come"))
                finally:
                    self._recovers = False

    def _can_go_back(self) -> bool:
        """Whether there is a whole checkpoint to go back to; logs that there is none."""
        try:
            self._origin_to_use()
        except CheckpointError as error:
            _log.warning("more workers have come, and the work cannot be divided anew: %s", error)
            return False
        return True

    def _recover(self, error: BaseException) -> None:
        """Go on with new workers, or raise if the run cannot go on."""
        noticed, failure, pauses = time.monotonic(), error, Backoff()
        while True:
            began = time.monotonic()
            if isinstance(failure, Grown):
                _log.warning("%s; the work is divided anew", failure)
            else:
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
                if not is_passing(again):
                    # There is no checkpoint to go back to, or no worker can be started.
                    raise again if isinstance(error, Grown) else error from again
                failure = again
            except Exception as again:
                if self.life.is_over:
                    raise PipelineClosed("the pipeline was closed") from again
                failure = self._coordinator_inbox.failure or again
            # What makes the system refuse, or workers end at once, may take a while to pass.
            threading.Event().wait(pauses.after("", time.monotonic() - began))
        restart = Restart(
            generation=self.generation,
            reason=(str(error) or type(error).__name__).splitlines()[0],
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
        """End the workers, start others, and feed them again since the newest restore point."""
        self._refuse_if_over()
        restore_point, manifest = self._origin_to_use()
        self.cluster.kill()
        self._begin(restore_point, manifest)
        replayed = 0
        for entry in self.log.since(restore_point):
            self._send_entry(entry)
            replayed += entry.role is Role.ENTRY
        return replayed

    def _origin_to_use(self) -> tuple[RestorePoint, Manifest | None]:
        """Return the newest restore point with a whole checkpoint, and that one's manifest."""
        while True:
            restore_point = self.log.restore_points[-1]
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
                if len(self.log.restore_points) == 1:
                    raise
                _log.warning("%s; the run goes back to the restore point before it", error)
                self.log.restore_points.pop()

    def _refuse_if_over(self) -> None:
        """Refuse to go on where a signal handler has closed the pipeline meanwhile."""
        if self.life.is_over:
            raise PipelineClosed("the pipeline was closed")

    def _begin(self, restore_point: RestorePoint, manifest: Manifest | None = None) -> None:
        """Start a generation of workers; wait until stages have the state of a restore point."""
        self._refuse_if_over()
        generation = next(_generations)
        inbox = self._coordinator_inbox
        inbox.begin(generation)
        self._cluster = self._start_cluster(inbox.receive, inbox.fail_of(generation), generation)
        try:
            self._refuse_if_over()  # what ended the pipeline meanwhile did not know these workers
        except PipelineClosed:
            self._cluster.close()
            raise
        inbox.cluster = self._cluster
        self._send = Sender(self._cluster.transport, COORDINATOR, generation)
        self._turns = [0] * len(self.plan.addresses)
        begun = range(len(self._forwards.definitions))
        self._defined = [set(begun) for _ in self.plan.addresses]
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
                announced=self.next_micro_batch,
                definitions=list(self._forwards.definitions),
            )
            self._send(edge.target, 0, start, self._specs[stage])
        for edge in self.plan.edges(EdgeKind.READY):
            self._wait(Key(edge, generation))


class Lease:
    """Keeps the workers until nothing refers to it, or the interpreter ends.

    Every object of the user's that needs the workers refers to it: the pipeline, a pending step,
    the handle of a stage, the optimizer.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group
        end = weakref.finalize(self, _close, group)
        group.before_workers_end.append(end.detach)  # else the finalizer would keep a closed group


def _close(group: WorkerGroup) -> None:
    """End the workers; called by the garbage collector or at the interpreter's end."""
    # The collector may run on any thread, also on one that `Lifecycle.close` waits for.
    if threading.current_thread() is threading.main_thread():
        group.life.close()
    else:
        threading.Thread(target=group.life.close, name="close", daemon=True).start()
