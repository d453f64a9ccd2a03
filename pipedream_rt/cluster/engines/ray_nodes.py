"""``pipedream-rt run --ray N SCRIPT``: N nodes of a job as actors of Ray, the script's own too.

The script runs in the first actor, so Ray starts it again as well when its node has died, perhaps
on another one. The actors learn where the first is now from a small actor beside the command; each
runs `pipedream-rt run` as on any node.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipedream_rt.cluster.addresses import joined
from pipedream_rt.cluster.control import EXIT_COORDINATOR_LOST
from pipedream_rt.cluster.engines.ray import RayWorkers
from pipedream_rt.cluster.environment import SECRET_FILE
from pipedream_rt.cluster.keys import Secret
from pipedream_rt.cluster.subprocesses import dies_with_parent
from pipedream_rt.deadline import Deadline

_LOOK_S = 2.0
"""Seconds after which the command looks again whether the first node has ended."""

_END_S = 30.0
"""Seconds for the other nodes to end when the script has."""

_PATIENCE_S = 3
"""Seconds after which an actor asks again where the first node is."""


def run_on_ray(
    nodes: int,
    options: Sequence[str],
    command: Sequence[str],
    deadline: Deadline,
    say: Callable[[str], object],
) -> int:
    """Run a script on nodes that Ray places, and restarts until the script has ended for good.

    Args:
        nodes: Number of nodes.
        options: Options of `pipedream-rt run` for every node.
        command: The script with its arguments.
        deadline: When to give up placing the nodes.
        say: Tells the user a line.

    Returns:
        The exit code of the script.

    Raises:
        ConfigError: Ray is not installed, or cannot be reached.
        RendezvousTimeout: Ray could not place the nodes in time.
    """
    engine = RayWorkers(strategy="SPREAD")
    ray = engine.connected()
    board = ray.remote(_Board).options(num_cpus=0).remote()
    engine.place(nodes, deadline)
    secret = Secret.generated().text
    try:
        lives = []
        for rank in range(nodes):
            actor = engine.actor(_Node, rank, f"node-{rank}", os.getcwd())
            lives.append(actor.serve.remote(board, rank, nodes, options, command, secret))
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
        """Know nothing yet."""
        self._address = ""

    def put(self, address: str) -> None:
        """Note the address."""
        self._address = address

    def get(self) -> str:
        """Return the address; empty if the first node has not come yet."""
        return self._address


class _Node:
    """An actor that runs one node of a job.

    Args:
        folder: The folder of the command, where the node runs if there is one of that name.
    """

    def __init__(self, folder: str) -> None:
        """Start nothing yet."""
        self._folder = folder

    def serve(
        self,
        board: Any,
        rank: int,
        nodes: int,
        options: Sequence[str],
        command: Sequence[str],
        secret: str,
    ) -> int:
        """Run the node until the script has ended for good.

        Args:
            board: Knows where the first node is.
            rank: Number of this one.
            nodes: How many there are.
            options: Options of `pipedream-rt run`.
            command: The script with its arguments.
            secret: The secret of the job, as an argument: Ray shows the environment of its actors.

        Returns:
            Exit code of `pipedream-rt run`.
        """
        import ray

        while True:
            if rank == 0:
                host = str(ray.util.get_node_ip_address())
                with socket.create_server((host, 0)) as free:
                    address = joined(host, free.getsockname()[1])
                ray.get(board.put.remote(address))
            else:
                address = ray.get(board.get.remote())
            code = self._run(address, rank, nodes, options, command, secret) if address else 3
            if code < 128 and code != EXIT_COORDINATOR_LOST:
                return code

    def _run(
        self,
        address: str,
        rank: int,
        nodes: int,
        options: Sequence[str],
        command: Sequence[str],
        secret: str,
    ) -> int:
        """Run the command of a node once, and return its exit code."""
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "secret"
            place.touch(mode=0o600)
            place.write_text(secret)
            words = [sys.executable, "-c", "from pipedream_rt.cli import main; main()", "run"]
            words += ["--nnodes", str(nodes), "--node-rank", str(rank), "--rdzv-endpoint", address]
            words += [*options, "--patience", str(_PATIENCE_S), *command]
            code = subprocess.run(
                words, env={**os.environ, SECRET_FILE: str(place)},
                cwd=self._folder if os.path.isdir(self._folder) else None,
                preexec_fn=dies_with_parent(signal.SIGKILL), check=False,
            ).returncode  # fmt: skip
        return 128 - code if code < 0 else code
