"""What each member of a group knows: who all are, and the key that they share."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

from pipedream_rt.schedules.edges import COORDINATOR, Address


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One generation of the group of processes that train together.

    Attributes:
        rank: The rank of this process; the coordinator has rank 0.
        names: By rank, the name of each process.
        hosts: By stage, the index of the worker that hosts it, which is its rank less one.
        key: The key of this generation, which only the members know.
    """

    generation: int
    rank: int
    names: tuple[str, ...]
    hosts: tuple[int, ...]
    key: bytes = field(repr=False)

    @property
    def name(self) -> str:
        """The name of this process."""
        return self.names[self.rank]

    @property
    def tag(self) -> bytes:
        """An id of this generation, unequal to all others, also of other lives of the script."""
        # Each generation draws its key anew. The tag, which goes to whoever calls, hides it.
        return hmac.digest(self.key, b"pipedream-rt group", "sha256")

    @property
    def others(self) -> tuple[int, ...]:
        """The ranks of all other processes."""
        return tuple(rank for rank in range(len(self.names)) if rank != self.rank)

    def rank_of(self, address: Address) -> int:
        """Return the rank of the process that receives for an address."""
        return 0 if address == COORDINATOR else 1 + self.hosts[address]
