"""Lets the user's loader run ahead of the pipe, on a thread of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _End:
    """After the last item; with the error that ended the loader, if one did."""

    error: BaseException | None


class _Ahead(Generic[T]):
    """A bounded queue that one thread fills from an iterable and another empties."""

    def __init__(self, iterable: Iterable[T], depth: int) -> None:
        """Nothing runs yet."""
        self._iterable = iterable
        self._depth = depth
        self._items: deque[T | _End] = deque()
        self._changed = threading.Condition()
        self._stopped = False

    def fill(self) -> None:
        """Iterate until the end, an error, or `stop`; the body of the thread."""
        end = _End(None)
        try:
            for item in self._iterable:
                if not self._put(item):
                    return
        except BaseException as error:  # the top of a thread: raised again on the caller's
            end = _End(error)
        self._put(end)

    def _put(self, item: T | _End) -> bool:
        """Add an item when there is room; False once stopped."""
        with self._changed:
            # No deadline: `stop` wakes it, and `ahead` calls that however it is left.
            self._changed.wait_for(lambda: self._stopped or len(self._items) < self._depth)
            if self._stopped:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def __iter__(self) -> Iterator[T]:
        """Yield the items in order; raises what the loader raised, after the items before it."""
        while True:
            with self._changed:
                # No deadline: how long the user's loader takes is the user's matter.
                self._changed.wait_for(lambda: bool(self._items))
                item = self._items.popleft()
                self._changed.notify_all()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            yield item

    def stop(self) -> None:
        """Let the thread end after the item at hand."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


@contextmanager
def ahead(iterable: Iterable[T], depth: int) -> Iterator[Iterator[T]]:
    """Iterate over something on another thread, at most ``depth`` items ahead.

    Args:
        iterable: The user's loader.
        depth: How many items may wait; 0 iterates on the calling thread.

    Yields:
        An iterator over the same items in the same order.
    """
    if depth == 0:
        yield iter(iterable)
        return
    queue = _Ahead(iterable, depth)
    thread = threading.Thread(target=queue.fill, name="loader")
    thread.start()
    try:
        yield iter(queue)
    finally:
        queue.stop()
        thread.join()
