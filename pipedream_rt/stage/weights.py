"""All weights that a stage uses: its own, and those that other stages own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

from torch import Tensor, nn

from pipedream_rt.schedules import Plan
from pipedream_rt.schedules.edges import Address
from pipedream_rt.stage.parameters import Adjust, GradientHook, VersionedParameters


class Weights:
    """The trainable weights of a stage in their versions, by the stage that owns them.

    Attributes:
        names: The name of each parameter in the unsplit model, by its name in the module.
        own: Those that the stage owns, and steps.
        borrowed: Those that other stages own, by owner.
        by_owner: All of these, by owner, the stage's own first.
        tied: The names of the weights that this stage and others use.
        next_forward: The next micro-batch that reads them.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        stage: int,
        address: Address,
        hooks: Sequence[GradientHook],
        names: Mapping[str, str],
    ) -> None:
        self._plan, self._stage, self._address = plan, stage, address
        self.next_forward = plan.next_own(address, 0)
        self.names = dict(names) or {name: name for name, _ in module.named_parameters()}
        owners = {
            tie.name: edge.source for edge, ties in plan.borrows(stage).items() for tie in ties
        }
        held: dict[int, dict[str, str]] = {stage: {}}
        for here, name in self.names.items():
            held.setdefault(owners.get(name, stage), {})[here] = name
        own = held.pop(stage)
        self.own = VersionedParameters(module, stage, hooks, own)
        self.borrowed = {
            owner: VersionedParameters(module, stage, (), of_owner)
            for owner, of_owner in sorted(held.items())
        }
        self.by_owner = [(stage, self.own), *self.borrowed.items()]
        self.tied = [tie.name for tie in plan.ties if stage in tie.stages]

    def holder(self, name: str) -> VersionedParameters:
        """Return the weights, of this stage or another owner, among which a name is."""
        return next(weights for _, weights in self.by_owner if name in weights.named)

    def leaves(self, micro_batch: int) -> list[Tensor]:
        """Return all weights as a micro-batch reads them, as autograd leaves."""
        return [leaf for _, weights in self.by_owner for leaf in weights.leaves(micro_batch)]

    def begin(self, micro_batch: int) -> None:
        """Let a micro-batch read the versions that the plan names, until `end`."""
        plan = self._plan
        for owner, weights in self.by_owner:
            version = plan.reads(owner, micro_batch)
            weights.begin(micro_batch, version, micro_batch // plan.per_update)
        self.next_forward = plan.next_own(self._address, micro_batch + 1)

    def end(self, micro_batch: int) -> int:
        """End the flight of a micro-batch; return the version of the stage's own that it read."""
        for weights in self.borrowed.values():
            weights.end(micro_batch)
        return self.own.end(micro_batch)

    def next_read(self, update: int) -> int:
        """Return the oldest version of its own that the stage reads once an update is made."""
        following = self._plan.next_of_stage(self._address, self.next_forward, update)
        return self._plan.reads(self._stage, following)

    def receive(self, owner: int, named: Mapping[str, Tensor]) -> None:
        """Take the next version of another stage's weights, by name in the unsplit model."""
        self.borrowed[owner].receive(self._plan.reads(owner, self.next_forward), dict(named))

    def reading(self, micro_batch: int) -> AbstractContextManager[None]:
        """Put the weights that a micro-batch reads into the module while the body runs."""
        if not self.borrowed:
            return self.own.reading(micro_batch)
        return entered(weights.reading(micro_batch) for _, weights in self.by_owner)

    def accumulating(self, micro_batch: int, adjust: Adjust | None) -> AbstractContextManager[None]:
        """Run the body as `reading` does, and add its gradients to those of the pending update."""
        if not self.borrowed:
            return self.own.accumulating(micro_batch, adjust)
        return entered(
            # Gradients of borrowed weights go to their owner as they are.
            weights.accumulating(micro_batch, adjust if owner == self._stage else None)
            for owner, weights in self.by_owner
        )


@contextmanager
def entered(contexts: Iterable[AbstractContextManager[object]]) -> Iterator[None]:
    """Enter all contexts, one after another."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
