"""The ledger: which micro-batch reads which weight version, in integers, without tensors.

Stages, the checker and the simulator share it, so that what is proved and simulated is what runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from pipedream_rt.errors import VersionError


class VersionLedger:
    """Which micro-batch reads which version, and which versions are kept.

    A version is kept while a micro-batch in flight reads it, while a later forward may read it, and
    while it is the newest. Every method takes constant time on average over a run. The thread that
    runs the stage owns the ledger.

    Args:
        stage: Index of the stage, for messages.
        floor: Number of the first version; no forward reads an older one.

    Attributes:
        floor: The oldest version that a forward may read.
        newest: The newest version.
        kept_most: The largest number of versions that were kept at a time.
    """

    def __init__(self, stage: int, floor: int = 0) -> None:
        self._stage = stage
        self.floor = floor
        self.newest = floor
        self.kept_most = 1
        self._pins: dict[int, int] = {}
        self._readers = {floor: 0}
        # No later forward reads a version older than `_swept`. `release` has dropped those of them
        # without a reader; `unpin` puts each of the others into `_to_drop` when its last reader
        # ends. `_swept` only rises, so that each version is looked at once in a run.
        self._swept = floor
        self._to_drop: list[int] = []

    @property
    def kept(self) -> Set[int]:
        """The versions that are kept."""
        return self._readers.keys()

    @property
    def in_flight(self) -> Set[int]:
        """The micro-batches that read a version, in the order of their forwards."""
        return self._pins.keys()

    def read(self, micro_batch: int, version: int) -> list[int]:
        """Begin the forward of a micro-batch: pin its version, and release older ones.

        Args:
            micro_batch: Number of the micro-batch.
            version: The version that the policy names; the floor is read in place of an older one.

        Returns:
            The versions dropped, oldest first.

        Raises:
            VersionError: The version is not kept, or the micro-batch is in flight already.
        """
        version = max(self.floor, version)
        dropped = self.release(version)
        self.pin(micro_batch, version)
        return dropped

    def update(self, next_read: int) -> tuple[list[int], bool]:
        """Do an update: release the versions that no later forward reads, and advance.

        Args:
            next_read: The version that the policy names for the next forward.

        Returns:
            The versions dropped, oldest first; and whether the new version overwrites the newest
            one, as `advance` returns it.
        """
        next_read = max(self.floor, next_read)
        return self.release(next_read), self.advance(next_read)

    def pin(self, micro_batch: int, version: int) -> None:
        """Let a micro-batch read a version until `unpin`.

        Raises:
            VersionError: The version is not kept, or the micro-batch is in flight already.
        """
        if version not in self._readers:
            raise VersionError(
                f"stage {self._stage}: F{micro_batch} reads weight version {version}, "
                f"but the versions kept are {sorted(self._readers)}"
            )
        if micro_batch in self._pins:
            raise VersionError(f"stage {self._stage}: micro-batch {micro_batch} is in flight twice")
        self._pins[micro_batch] = version
        self._readers[version] += 1

    def pinned(self, micro_batch: int) -> int:
        """Return the version that a micro-batch in flight reads.

        Raises:
            VersionError: The micro-batch is not in flight.
        """
        if micro_batch not in self._pins:
            raise VersionError(
                f"stage {self._stage}: B{micro_batch} has no forward before it; the micro-batches "
                f"in flight are {list(self._pins)}"
            )
        return self._pins[micro_batch]

    def unpin(self, micro_batch: int) -> int:
        """End the reading of a micro-batch.

        Returns:
            The version that it read.

        Raises:
            VersionError: The micro-batch is not in flight.
        """
        version = self.pinned(micro_batch)
        del self._pins[micro_batch]
        readers = self._readers
        readers[version] = left = readers[version] - 1
        if not left and version < self._swept:
            self._to_drop.append(version)
        return version

    def can_overwrite(self, next_read: int) -> bool:
        """Whether the newest version may be changed in place.

        Args:
            next_read: The version that the next forward will read; later ones read no older one.
        """
        return next_read > self.newest and not self._readers[self.newest]

    def release(self, next_read: int) -> list[int]:
        """Drop the versions that no micro-batch reads, now or later.

        Args:
            next_read: The version that the next forward reads; later ones read no older one.

        Returns:
            The versions dropped, oldest first.
        """
        if next_read <= self._swept and not self._to_drop:
            return []  # most calls: one for each forward, one for each step
        dropped, self._to_drop = self._to_drop, []
        readers, end = self._readers, min(next_read, self.newest)  # the newest always stays
        for version in range(self._swept, end):
            # `get`, since a version that was overwritten is not there any more.
            if readers.get(version) == 0:
                dropped.append(version)
        self._swept = max(self._swept, end)
        for version in dropped:
            del readers[version]
        dropped.sort()
        return dropped

    def advance(self, next_read: int) -> bool:
        """Add a version, which becomes the newest.

        Args:
            next_read: The version that the next forward reads; later ones read no older one.

        Returns:
            Whether the new version overwrites the one before it; else both are kept.
        """
        in_place = self.can_overwrite(next_read)
        if in_place:
            del self._readers[self.newest]
        self.newest += 1
        self._readers[self.newest] = 0
        self.kept_most = max(self.kept_most, len(self._readers))
        return in_place

    def restore(self, newest: int, older: Iterable[int]) -> None:
        """Begin with the versions of a checkpoint.

        Args:
            newest: The newest version, which is the number of updates done.
            older: The older versions that the checkpoint has.

        Raises:
            VersionError: A micro-batch is in flight.
        """
        self.reset()
        kept = sorted({newest, *older})
        self.newest = newest
        self.floor = self._swept = kept[0]
        self._readers = dict.fromkeys(kept, 0)
        self.kept_most = max(self.kept_most, len(kept))

    def reset(self) -> list[int]:
        """Forget all versions but the newest, which becomes the floor: new weights are loaded.

        Returns:
            The versions dropped, oldest first.

        Raises:
            VersionError: A micro-batch is in flight.
        """
        if self._pins:
            raise VersionError(
                f"stage {self._stage}: cannot replace the weights while micro-batches "
                f"{list(self._pins)} are in flight; flush first"
            )
        dropped = sorted(self._readers.keys() - {self.newest})
        self._readers = {self.newest: 0}
        self._to_drop = []
        self.floor = self._swept = self.newest
        return dropped
