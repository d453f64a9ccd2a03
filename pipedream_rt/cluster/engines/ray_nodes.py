"""``pipedream-rt run --ray N SCRIPT``: the N nodes of a job are actors of Ray.

The script runs in the first actor, so Ray starts the script again too when its node has died,
perhaps on another one. The actors ask a small actor, the board, where the first is now; each runs
`pipedream-rt run` as on any node.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pipedream_rt.cluster.addresses import joined
from pipedream_rt.cluster.engines.ray import RayWorkers
from pipedream_rt.cluster.environment import SECRET
from pipedream_rt.cluster.identity import Secret
from pipedream_rt.cluster.subprocesses import Backoff, dies_with_parent
from pipedream_rt.cluster.worker_life import Starter, is_started_again, shell_code
from pipedream_rt.deadline import Deadline

_LOOK_S = 2.0
"""Seconds between two looks: at the end of the first node, of a command, and at the board."""

_END_S = 30.0
"""Seconds for the other nodes to end when the script has."""

_PATIENCE_S = 3
"""Seconds for which a node tries one address before its actor asks the board again."""


def run_on_ray(
    nodes: int,
    options: Sequence[str],
    command: Sequence[str],
    deadline: Deadline,
    say: Callable[[str], object],
) -> int:
    """Run a script on nodes that Ray places, and restarts until the script has ended for good."""
    engine = RayWorkers(strategy="SPREAD")
    ray = engine.connected()
    board = ray.remote(_Board).options(num_cpus=0).remote()
    engine.place(nodes, deadline)
    settings = _NodeSettings(nodes, options, command, Secret.generated().text, os.getcwd())
    try:
        actors = [engine.actor(_NodeActor, rank, f"node-{rank}") for rank in range(nodes)]
        lives = [actor.serve.remote(board, rank, settings) for rank, actor in enumerate(actors)]
        # With a timeout, again and again: a blocking wait segfaults if Ray is torn down.
        while not (ended := ray.wait(lives[:1], timeout=_LOOK_S)[0]):
            pass
        code = int(ray.get(ended[0]))
        if nodes > 1:
            _, waiting = ray.wait(lives[1:], num_returns=nodes - 1, timeout=_END_S)
            if waiting:
                say(f"{len(waiting)} of {nodes - 1} other nodes did not end by themselves")
        return code
    finally:
        engine.stop()
        ray.kill(board)


class _Board:
    """An actor that knows where the first node is."""

    def __init__(self) -> None:
        self._address = ""

    def put(self, address: str) -> None:
        """Note the address of the first node, ``HOST:PORT``."""
        self._address = address

    def get(self) -> str:
        """Return that address; empty if the first node has not come yet."""
        return self._address


@dataclass(frozen=True, slots=True)
class _NodeSettings:
    """What the nodes of a job run, the same for each.

    Attributes:
        secret: The secret of the job, as an argument: Ray shows the environment of its actors.
        folder: The folder of the command; a node runs there if it has one of that name.
    """

    nodes: int
    options: Sequence[str]
    command: Sequence[str]
    secret: str
    folder: str


class _NodeActor:
    """The actor of one node of a job."""

    def serve(self, board: Any, rank: int, settings: _NodeSettings) -> int:
        """Run the node until the script has ended for good; return its exit code."""
        # An extra that may not be installed.
        import ray

        pauses = Backoff()
        while True:
            if rank == 0:
                host = str(ray.util.get_node_ip_address())
                with socket.create_server((host, 0)) as free:
                    address = joined(host, free.getsockname()[1])
                ray.get(board.put.remote(address))
            else:
                address = ray.get(board.get.remote())
                if not address:  # the first node has not come yet
                    threading.Event().wait(_LOOK_S)
                    continue
            began = time.monotonic()
            command = self._started(address, rank, settings)
            while (code := _code_within(command, _LOOK_S)) is None:
                # The first node may have moved, and another program may listen at its old port.
                if rank and ray.get(board.get.remote()) != address:
                    command.kill()
            if not is_started_again(Starter.ENGINE, code):
                return code
            threading.Event().wait(pauses.after("", time.monotonic() - began))

    def _started(self, address: str, rank: int, settings: _NodeSettings) -> subprocess.Popen[bytes]:
        """Start the command of a node; it removes the secret from its environment."""
        words = [sys.executable, "-c", "from pipedream_rt.cli import main; main()", "run"]
        words += ["--nnodes", str(settings.nodes), "--node-rank", str(rank)]
        words += ["--rdzv-endpoint", address, *settings.options]
        words += ["--patience", str(_PATIENCE_S), *settings.command]
        return subprocess.Popen(
            words, env={**os.environ, SECRET: settings.secret},
            cwd=settings.folder if os.path.isdir(settings.folder) else None,
            preexec_fn=dies_with_parent(signal.SIGKILL),
        )  # fmt: skip


def _code_within(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Return the exit code of a process; None if it has not ended in time."""
    try:
        return shell_code(process.wait(seconds))
    except subprocess.TimeoutExpired:
        return None
