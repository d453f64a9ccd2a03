"""Shards: each replica steps its own part of the weights, and takes the rest from the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipedream_rt.schedules import EdgeKind
from pipedream_rt.schedules.edges import Address
from pipedream_rt.stage.rules.rule import Context, Update, UpdateRule
from pipedream_rt.stage.values import Outgoing


class Shards(UpdateRule):
    """The weights of a stage, dealt to its replicas.

    Source: Rajbhandari et al., ZeRO (SC 2020), section 5.1, stage 1 (optimizer states).
    """

    channels = (EdgeKind.STEPPED,)

    def __init__(self, context: Context) -> None:
        self._named = named = context.named
        self._address = context.address
        held = dict.fromkeys(context.plan.addresses_of(context.stage), 0)
        self._dealt: dict[Address, list[str]] = {address: [] for address in held}
        # The largest first, each to the replica with the fewest bytes: a good balance, and the same
        # on all replicas, so that nobody has to send names.
        for name in sorted(named, key=lambda each: -named[each].nbytes):
            least = min(held, key=lambda address: held[address])
            held[least] += named[name].nbytes
            self._dealt[least].append(name)
        self._received: dict[Address, Sequence[Tensor]] = {}

    def stepped(self, named: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Return the parameters that this replica steps, by name, in the order of the module."""
        mine = {*self._dealt[self._address]}
        return {name: parameter for name, parameter in named.items() if name in mine}

    @torch.no_grad()
    def after(self, update: Update, optimizer: torch.optim.Optimizer | None) -> Outgoing:
        """Send the weights that this replica has stepped to the others."""
        # Copies, since the next step may change these weights in place.
        named = self._named
        mine = tuple(named[name].detach().clone() for name in self._dealt[self._address])
        return {EdgeKind.STEPPED: mine}

    def receive(self, kind: EdgeKind, sender: Address, value: Any) -> None:
        """Take the weights that another replica has stepped."""
        self._received[sender] = value

    @torch.no_grad()
    def take(self, update: int) -> None:
        """Copy in the weights that others have stepped."""
        received, self._received = self._received, {}
        for address, tensors in received.items():
            for name, tensor in zip(self._dealt[address], tensors, strict=True):
                self._named[name].data.copy_(tensor)
