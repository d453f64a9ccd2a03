"""The lease of the workers: they end when nothing refers to it any more."""

from __future__ import annotations

import threading
import weakref

from pipedream_rt.coordinator.group import WorkerGroup


class Lease:
    """Keeps the workers until nothing refers to it, or the interpreter ends.

    Every object of the user's that needs the workers refers to it: the pipeline, a pending step,
    the handle of a stage, the optimizer.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group
        end = weakref.finalize(self, _close, group)
        group.at_end.append(end.detach)  # else the finalizer would keep a closed group


def _close(group: WorkerGroup) -> None:
    """End the workers; called by the garbage collector or at the interpreter's end."""
    # The collector may run on any thread, also on one that `Lifecycle.close` waits for.
    if threading.current_thread() is threading.main_thread():
        group.life.close()
    else:
        threading.Thread(target=group.life.close, name="close", daemon=True).start()
