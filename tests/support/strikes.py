"""Kills of workers from outside at a named place: as the script's process comes by a function."""

import functools
import os
import pkgutil
import signal

OPENING = [
    f"pipedream_rt.cluster.generation:Generation.{step}"
    for step in ("gather", "welcome", "connect", "all_joined", "watch")
] + ["pipedream_rt.coordinator.recovery.recovery:Recovery.wait"]
"""The steps in which a generation of workers begins."""

CLOSING = [
    "pipedream_rt.pipeline:Pipeline.flush",
    "pipedream_rt.coordinator.run_state:RunState.finish_checkpoint",
    "pipedream_rt.pipeline:Pipeline._traced",
    "pipedream_rt.cluster.generation:Generation.stop",
    "pipedream_rt.cluster.generation:Generation.leave",
]
"""The steps in which a pipeline ends."""

FEEDING = "pipedream_rt.coordinator.recovery.feed:Feed._send_entry"
"""What gives the stages an item: a micro-batch or a command."""


class Strikes:
    """Kills a worker of the local ones, by its number, before a call of a function.

    Attributes:
        left: Where to strike next: functions, by their full names, each with the number of calls
            to let pass before; the first of them waits, the others wait for it.
        struck: Where it has struck.
    """

    def __init__(self, monkeypatch, places):
        self.left, self.struck, self._workers = [], [], None
        for place in places:
            owner, name = pkgutil.resolve_name(place.rpartition(".")[0]), place.rpartition(".")[2]
            monkeypatch.setattr(owner, name, self._watched(getattr(owner, name), place))
        local = pkgutil.resolve_name("pipedream_rt.cluster.local:Local")
        start = local.start

        def started(workers, names):
            self._workers = workers  # of the generation that begins
            return start(workers, names)

        monkeypatch.setattr(local, "start", started)

    def at(self, place, worker, after=0):
        self.left.append((place, worker, after))

    def _watched(self, function, place):
        @functools.wraps(function)
        def watched(*args, **kwargs):
            self._come_by(place)
            return function(*args, **kwargs)

        return watched

    def _come_by(self, place):
        if not self.left or self.left[0][0] != place:
            return
        _, worker, after = self.left[0]
        if after:
            self.left[0] = place, worker, after - 1
            return
        self.left.pop(0)
        processes = list(self._workers.processes.values())
        victim = processes[worker % len(processes)]
        if victim.poll() is None:
            os.kill(victim.pid, signal.SIGKILL)
            self.struck.append(place)
