"""The feed of the stages, past and next: positions, turns, and the log for recoveries."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TypeAlias

from torch import Tensor

from pipedream_rt.batches.forwards import Forwards
from pipedream_rt.batches.micro_batches import MicroBatch
from pipedream_rt.coordinator.recovery.feed_log import (
    Entry,
    FedCommand,
    FedMicroBatch,
    FeedLog,
    RestorePoint,
    Role,
)
from pipedream_rt.lifecycle import Lifecycle
from pipedream_rt.messages.head import Head, LossTask, Mode
from pipedream_rt.messages.message import (
    Activation,
    Command,
    CommandName,
    Gradient,
    Key,
    Send,
    Target,
)
from pipedream_rt.messages.tree import flat_copy, flatten, unflatten
from pipedream_rt.schedules import COORDINATOR, Edge, EdgeKind, Plan
from pipedream_rt.schedules.edges import Address

Tensors: TypeAlias = tuple[Tensor, ...]

_TOUCHING = (
    CommandName.LOAD, CommandName.LOAD_STATE, CommandName.LOAD_OPTIMIZER_STATE, CommandName.CALL,
    CommandName.METHOD,
)  # fmt: skip
"""The commands that may change weights or optimizers."""


class Feed:
    """The feed of the stages of the present generation.

    Attributes:
        position: Position of the next item.
        next_micro_batch: Number of the next micro-batch to be fed for training.
        training: The mode that all modules were set to (`Module.train`); None if never.
        loads: The number of times that weights were loaded.
        touched: Whether stages got a command that may have changed weights or optimizers.
        log: The feed since the restore points.
    """

    def __init__(self, plan: Plan, forwards: Forwards, life: Lifecycle, *, logged: bool) -> None:
        self._plan, self._forwards, self._life = plan, forwards, life
        self._send: Send = lambda *_: None
        self._turns = [0] * len(plan.addresses)  # by address, the number of items that it was fed
        self._defined = 0  # one past the last program that this generation knows
        # By program, the position where it was fed last; those that nobody follows any more, of
        # which a recovery may need some; and those of them that this generation still has.
        self._last_fed: dict[int, int] = {}
        self._unused: deque[int] = deque()
        self._untold: list[int] = []
        self._optimizer = b""  # the present `OptimizerSpec`, pickled
        self._apart: dict[int, bool] = {}  # by stage, the mode that it was set to by itself
        self.position = self.next_micro_batch = self.loads = 0
        self.training: bool | None = None
        self.touched = False
        self.log = FeedLog(on=logged)

    def begin(self, send: Send) -> list[bytes]:
        """Begin a generation; return the definitions with which its stages start."""
        self._send = send
        self._turns = [0] * len(self._plan.addresses)
        definitions = self._forwards.definitions
        self._defined, self._untold = max(definitions, default=-1) + 1, list(self._unused)
        return list(definitions.values())

    def define(self) -> None:
        """Tell the stages of the programs that were recorded, or forgotten, since the last time."""
        definitions = self._forwards.definitions
        if not definitions or next(reversed(definitions)) < self._defined:
            return
        new = [definition for n, definition in definitions.items() if n >= self._defined]
        unused = self._forwards.unused()
        self._unused += unused
        forgotten, self._untold = [*self._untold, *unused], []
        self._defined = next(reversed(definitions)) + 1
        # Not kept for recoveries: a later generation starts with all of them.
        self.log.forget(self.command(CommandName.DEFINE, [new, forgotten]))
        oldest = self.log.restore_points[0].position if self.log.on else self.position
        while self._unused and self._last_fed.get(self._unused[0], -1) < oldest:
            self._forwards.drop(program := self._unused.popleft())
            self._last_fed.pop(program, None)

    def micro_batch(self, head: Head, part: MicroBatch, task: LossTask) -> None:
        """Feed a micro-batch, and keep it for recoveries; its head has the next position."""
        self._life.check()
        # An error between input and target must end the pipeline.
        with self._life.guard("a micro-batch was fed"):
            self._last_fed[part.program] = head.position
            self._feed(FedMicroBatch(head, part, task))
            if head.mode is Mode.TRAIN:
                self.next_micro_batch = head.micro_batch + 1

    def gradient(
        self, micro_batch: int, position: int, payload: Gradient, tensors: Tensors
    ) -> None:
        """Feed the gradient that the script gives for an output, and keep it for recoveries."""
        self._life.check()
        if self.log.on:
            self.log.gradients[position] = payload, tensors
        with self._life.guard("a gradient was sent"):
            self._send_gradient(micro_batch, position, payload, tensors)

    def command(self, name: CommandName, argument: object = None, role: Role = Role.EVERY) -> int:
        """Feed a command, keep it for recoveries, and return its position; wait for no reply."""
        self._life.check()
        structure, tensors, _ = flat_copy(argument)
        position = self.position
        with self._life.guard(f"the command {name.value} was sent"):
            command = Command(position=position, name=name, structure=structure)
            self._feed(FedCommand(command, tensors, role))
            if name is CommandName.OPTIMIZER:
                self._optimizer = unflatten(structure, tensors)
            if name is CommandName.TRAINING:
                only, training = unflatten(structure, tensors)
                if only is None:
                    self.training, self._apart = training, {}
                else:
                    self._apart[only] = training
            self.loads += name in (CommandName.LOAD, CommandName.LOAD_STATE)
            self.touched |= name in _TOUCHING
        return position

    def _feed(self, entry: Entry) -> None:
        """Send an item, and keep it for recoveries."""
        self._send_entry(entry)
        if self.log.on:
            self.log.append(entry)
        self.position += 1

    def again(self, restore_point: RestorePoint) -> int:
        """Feed again what was fed after a restore point; return the number of micro-batches."""
        replayed = 0
        for entry in self.log.since(restore_point):
            self._send_entry(entry)
            replayed += isinstance(entry, FedMicroBatch)
            if isinstance(entry, FedMicroBatch) and entry.position in self.log.gradients:
                gradient = self.log.gradients[entry.position]
                self._send_gradient(entry.head.micro_batch, entry.position, *gradient)
        return replayed

    def restore_point(self) -> RestorePoint:
        """Return a restore point behind what was fed last, without a folder."""
        return RestorePoint(
            position=self.position,
            optimizer=self._optimizer,
            training=self.training,
            apart=tuple(self._apart.items()),
        )

    def _send_entry(self, entry: Entry) -> None:
        """Send an item to the addresses that it is for."""
        if isinstance(entry, FedMicroBatch):
            self._send_micro_batch(*entry)
        else:
            self._send_command(*entry)

    def _send_micro_batch(self, head: Head, part: MicroBatch, task: LossTask) -> None:
        plan = self._plan
        route = head.micro_batch if head.mode is Mode.TRAIN else 0
        on_its_way = [plan.address_of(stage, route) for stage in range(plan.num_stages)]
        turns = [self._next_turn(address) for address in on_its_way]
        asks = {id(t) for t, asked in zip(part.inputs.tensors, part.inputs.requires_grad) if asked}
        for stage, structure, tensors in self._forwards.shares(part.program, part.inputs):
            activation = Activation(
                head=head,
                turns=turns,
                structure=structure,
                requires_grad=[id(tensor) in asks for tensor in tensors],
            )
            key = Key(Edge(EdgeKind.ACTIVATION, COORDINATOR, on_its_way[stage]), turns[stage])
            self._send(key, activation, tensors)
        if not head.has_target:
            return
        target = Target(structure=part.target.structure, task=task)
        for stage in plan.exits:
            key = Key(Edge(EdgeKind.TARGET, COORDINATOR, on_its_way[stage]), turns[stage])
            self._send(key, target, part.target.tensors)

    def _send_gradient(
        self, micro_batch: int, position: int, payload: Gradient, tensors: Tensors
    ) -> None:
        exit_ = self._plan.address_of(self._plan.exits[0], micro_batch)
        self._send(Key(Edge(EdgeKind.GRADIENT, COORDINATOR, exit_), position), payload, tensors)

    def _send_command(self, command: Command, tensors: tuple[Tensor, ...], role: Role) -> None:
        plan = self._plan
        parts = [(command, tensors)] * plan.num_stages
        if role is Role.OWN:
            owned = map(flatten, plan.part(unflatten(command.structure, tensors)))
            parts = [(replace(command, structure=of), tuple(own)) for of, own in owned]
        for address in plan.addresses:
            key = Key(Edge(EdgeKind.COMMAND, COORDINATOR, address), self._next_turn(address))
            self._send(key, *parts[plan.stage_of(address)])

    def _next_turn(self, address: Address) -> int:
        """Count an item for an address; return how many this generation fed it before."""
        self._turns[address] += 1
        return self._turns[address] - 1
