"""The bookkeeping of weight versions: integers only, shared by the stage and the simulator."""

from __future__ import annotations

from collections.abc import Iterable, Set

from pipedream_rt.errors import VersionError


class VersionLedger:
    """Who reads which version, and which versions must be kept.

    A version is kept while a micro-batch in flight has it pinned, while a forward to come may read
    it, or while it is the newest. Every method takes constant time, over a run. Not thread-safe:
    owned by the thread that runs the stage.

    Args:
        stage: Index used in messages.
        floor: Number of the first version; forwards never read below it.
    """

    def __init__(self, stage: int, floor: int = 0) -> None:
        """Start with one version, which nobody reads."""
        self._stage = stage
        self.floor = floor
        self.newest = floor
        self.kept_most = 1
        self._pins: dict[int, int] = {}
        self._readers = {floor: 0}
        # `release` has looked at every version older than this one. Those that had readers then
        # wait here until their last reader ends.
        self._swept = floor
        self._to_drop: list[int] = []

    @property
    def kept(self) -> Set[int]:
        """The versions held now."""
        return self._readers.keys()

    @property
    def in_flight(self) -> Set[int]:
        """The micro-batches that have a version pinned, oldest first."""
        return self._pins.keys()

    def read(self, micro_batch: int, version: int) -> list[int]:
        """Begin the forward of a micro-batch: release what is older than it reads, and pin that.

        Args:
            micro_batch: Its number.
            version: What the policy says; the floor is read in the place of an older one.

        Returns:
            The versions dropped, oldest first.

        Raises:
            VersionError: As `pin`.
        """
        version = max(self.floor, version)
        dropped = self.release(version)
        self.pin(micro_batch, version)
        return dropped

    def update(self, next_read: int) -> tuple[list[int], bool]:
        """Do an update: release what the next forward does not read, and advance.

        Args:
            next_read: The version that the policy says the next forward reads.

        Returns:
            The versions dropped, oldest first; and whether the new version takes the place of the
            newest one, as `advance` returns it.
        """
        next_read = max(self.floor, next_read)
        return self.release(next_read), self.advance(next_read)

    def pin(self, micro_batch: int, version: int) -> None:
        """Note that a micro-batch reads a version until `unpin`.

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
            VersionError: It is not in flight.
        """
        if micro_batch not in self._pins:
            raise VersionError(
                f"stage {self._stage}: B{micro_batch} without a forward in flight; "
                f"in flight are {list(self._pins)}"
            )
        return self._pins[micro_batch]

    def unpin(self, micro_batch: int) -> int:
        """End the reading that `pin` began.

        Returns:
            The version that was read.
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
        """Drop the versions that nobody reads and no forward to come will read.

        Returns:
            Their numbers, oldest first.
        """
        if next_read <= self._swept and not self._to_drop:
            return []  # most calls: one for each forward, one for each step
        dropped, self._to_drop = self._to_drop, []
        readers, end = self._readers, min(next_read, self.newest)
        for version in range(self._swept, end):
            # A version that was changed in place is not there any more.
            if readers.get(version) == 0:
                dropped.append(version)
        self._swept = max(self._swept, end)
        for version in dropped:
            del readers[version]
        dropped.sort()
        return dropped

    def advance(self, next_read: int) -> bool:
        """Make the next version the newest.

        Returns:
            Whether it takes the place of the old newest one; else that one is kept beside it.
        """
        in_place = self.can_overwrite(next_read)
        if in_place:
            del self._readers[self.newest]
        self.newest += 1
        self._readers[self.newest] = 0
        self.kept_most = max(self.kept_most, len(self._readers))
        return in_place

    def restore(self, newest: int, older: Iterable[int]) -> None:
        """Begin with versions that were kept before, as when a run goes on from a checkpoint.

        Args:
            newest: Updates done.
            older: Versions before it that are there.

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
        """Forget every version but the newest, which becomes the floor (weights were loaded).

        Returns:
            The versions dropped.

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
