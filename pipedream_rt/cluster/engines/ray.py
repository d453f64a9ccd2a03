"""Workers that Ray places and restarts: ``Pipeline(..., workers="ray")``.

A placement group has one bundle for each worker, with an actor in it. torch RPC is global to a
process and a recovery kills processes, so an actor runs its worker in a child process. Ray is the
supervisor: it restarts an actor whose process or node has died, and calls its one long method
again. Messages do not pass through Ray.

See https://docs.ray.io/en/latest/ray-core/fault_tolerance/actors.html and
https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html.
"""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pipedream_rt.cluster.addresses import address_towards, interface_towards, listening
from pipedream_rt.cluster.elsewhere import Elsewhere
from pipedream_rt.cluster.identity import Secret
from pipedream_rt.cluster.subprocesses import dies_with_parent
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import ConfigError, RendezvousTimeout
from pipedream_rt.telling import log_of

if TYPE_CHECKING:
    import ray as _ray

_log = log_of(__name__)

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")

_PATIENCE_S = 600.0
"""Seconds for which a worker waits for the script's next group. It may be long: Ray itself ends the
actors of a script that is gone."""

_LOOK = timedelta(seconds=2)
"""For Ray to report how an actor has ended."""


class RayWorkers(Elsewhere):
    """Workers on the nodes of a Ray cluster, for ``Pipeline(workers=...)``.

    The script is the driver: it is connected to the cluster by ``ray.init`` (its own, or one made
    here with Ray's defaults, which follow ``RAY_ADDRESS`` and ``ray job submit``). All nodes must
    reach the driver, and each other. One value serves one pipeline at a time.

    Args:
        strategy: How the workers are spread over nodes: ``"PACK"``, ``"SPREAD"``,
            ``"STRICT_PACK"`` or ``"STRICT_SPREAD"``, as in ``ray.util.placement_group``.
        resources: What each worker needs, as ``{"CPU": 4, "GPU": 1}``.
        runtime_env: The runtime environment of the actors, as ``{"working_dir": "."}``.

    Raises:
        ConfigError: A value makes no sense, or Ray is not installed.
    """

    def __init__(
        self,
        strategy: str = "PACK",
        resources: Mapping[str, float] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
    ) -> None:
        if strategy not in STRATEGIES:
            raise ConfigError(f"strategy must be one of {', '.join(STRATEGIES)}, not {strategy!r}")
        self._strategy = strategy
        self._resources = dict(resources if resources is not None else {"CPU": 1})
        if not self._resources or any(
            isinstance(amount, bool) or not isinstance(amount, int | float) or not amount > 0
            for amount in self._resources.values()
        ):
            raise ConfigError(
                "resources must say what each worker needs, as {'CPU': 1}, not "
                f"{self._resources!r}"
            )
        self._runtime_env = dict(runtime_env or {})
        self._ray = _import_ray()
        self._secret = Secret.generated()
        self._group: Any = None
        self._actors: dict[str, Any] = {}
        self._lives: dict[str, Any] = {}  # what the long method of each will return, by name

    def secret(self) -> Secret:
        """Return a new secret, which goes to the actors with their work."""
        return self._secret

    def listening(self) -> AbstractContextManager[socket.socket]:
        """Listen at the address of this machine that the nodes of Ray reach."""
        return listening(self.host(), 0)

    def host(self) -> str:
        """Return the numeric address of this machine that the nodes of Ray reach."""
        ray = self.connected()
        # A client is on no node of the cluster: what matters is its address towards the head.
        if ray.util.client.ray.is_connected():
            head = ray.util.client.ray.get_context().client_worker._conn_str
            return address_towards(head.rpartition("/")[2])
        return str(ray.util.get_node_ip_address())

    def start(self, count: int, address: str, secret: Secret, deadline: Deadline) -> None:
        """Reserve room for the workers once, and start those that do not run."""
        self.connected()
        if self._group is None:
            self.place(count, deadline)
        for index in range(count):
            name = f"ray-{index}"
            if name in self._lives and not self._has_ended(name):
                continue
            if name not in self._actors:
                self.actor(_WorkerActor, index, name)
            self._lives[name] = self._actors[name].serve.remote(address, name, secret.text)

    def ending(self, name: str) -> str:
        """How the actor of a worker has ended; empty while it has not."""
        if name not in self._lives or not self._has_ended(name):
            return ""
        errors = self._ray.exceptions
        try:
            code = self._ray.get(self._lives[name], timeout=_LOOK.total_seconds())
        except errors.ActorUnschedulableError as error:
            return f"Ray cannot schedule its actor ({_first_line(error)}); {_ADD}"
        except errors.NodeDiedError as error:
            return f"its node has died ({_first_line(error)}); Ray starts it on another one"
        except errors.RayActorError as error:
            return f"its actor has died ({_first_line(error)}); `ray logs` has what it said"
        except errors.RayError as error:
            return f"Ray says: {_first_line(error)}"
        return f"exit code {code}; `ray logs` has what it said"

    def missing(self) -> str:
        """Which actors have ended, and what Ray has to place them."""
        ended = {name: self.ending(name) for name in self._lives}
        endings = [f"worker {name!r}: {why}" for name, why in ended.items() if why]
        return "; ".join([*endings, f"Ray has {self._nodes_text()}", _ADD])

    def replace(self, names: Collection[str]) -> None:
        """Kill the actors of workers; Ray starts each again, with its method."""
        for name in names:
            if name in self._actors:
                self._ray.kill(self._actors[name], no_restart=False)

    def stop(self) -> None:
        """End all actors and give back what was reserved. Idempotent."""
        actors, group = list(self._actors.values()), self._group
        self._actors, self._lives, self._group = {}, {}, None
        if not self._ray.is_initialized():
            return  # Ray ends its actors with it
        for actor in actors:
            self._ray.kill(actor)
        if group is not None:
            self._ray.util.remove_placement_group(group)

    def actor(self, kind: type, index: int, name: str) -> Any:
        """Start an actor in a bundle; Ray starts it again when it dies, and its method too.

        Args:
            kind: Its class.
            index: Number of the bundle, 0-based.
            name: Name of the worker, for `ending` and `replace`.

        Returns:
            The handle of the actor.
        """
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        made = self._ray.remote(kind).options(
            num_cpus=self._resources.get("CPU", 0),
            num_gpus=self._resources.get("GPU", 0),
            resources={k: v for k, v in self._resources.items() if k not in ("CPU", "GPU")},
            max_restarts=-1,
            max_task_retries=-1,
            runtime_env=self._runtime_env or None,
            scheduling_strategy=strategy(self._group, placement_group_bundle_index=index),
        )
        actor = self._actors[name] = made.remote()
        return actor

    def connected(self) -> Any:
        """Return the module of Ray, connected to a cluster.

        Raises:
            ConfigError: There is no cluster where the environment says that there is one.
        """
        if not self._ray.is_initialized():
            try:
                self._ray.init(logging_level=logging.WARNING)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise ConfigError(
                    f"Ray cannot be reached: {_first_line(error)}; call ray.init in the script, or "
                    "set RAY_ADDRESS"
                ) from error
        return self._ray

    def place(self, count: int, deadline: Deadline) -> None:
        """Reserve what all workers need, in a placement group.

        Args:
            count: How many workers there are to be.
            deadline: When to give up; an hour if it has none.

        Raises:
            RendezvousTimeout: Ray does not have it, or not in time.
        """
        bundles = [self._resources] * count
        group = self._ray.util.placement_group(bundles, strategy=self._strategy)
        self._group = group
        wait_s = deadline.remaining_s()
        if not group.wait(timeout_seconds=3600 if wait_s is None else wait_s):
            has = self._nodes_text()
            self.stop()
            seconds = deadline.timeout.total_seconds() if deadline.timeout else 3600
            raise RendezvousTimeout(
                f"Ray could not place {count} workers of {_amounts(self._resources)} each with "
                f"{self._strategy} within {seconds:g} s; it has {has}; {_ADD}",
                missing=count,
            )

    def _has_ended(self, name: str) -> bool:
        """Whether the long method of an actor has returned or failed for good; never blocks."""
        return bool(self._ray.wait([self._lives[name]], timeout=0)[0])

    def _nodes_text(self) -> str:
        """The nodes that Ray has, and what is free in all together, for messages."""
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        kinds = self._resources
        nodes = ", ".join(
            _amounts({kind: node["Resources"].get(kind, 0) for kind in kinds}) for node in alive
        )
        free = self._ray.available_resources()
        of_them = _amounts({kind: free.get(kind, 0) for kind in kinds})
        return f"{len(alive)} nodes ({nodes}), and {of_them} free in all"


class _WorkerActor:
    """An actor that runs a worker in a child process."""

    def serve(self, address: str, name: str, secret: str) -> int:
        """Run a worker in a child process until it ends; return its exit code."""
        # The secret goes through standard input: others can read command lines.
        command = [sys.executable, "-m", "pipedream_rt.workers", address, "--name", name]
        command += ["--bind", interface_towards(address), "--persist", "--secret-stdin"]
        command += ["--timeout", str(_PATIENCE_S)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, preexec_fn=dies_with_parent(signal.SIGKILL)
        ) as child:
            child.communicate(secret.encode())
            return child.returncode


_ADD = (
    "give RayWorkers(resources=..., strategy=...) that fit, add nodes, or wait longer with "
    "recovery=Recovery(start=...)"
)


def _import_ray() -> _ray:
    """Import Ray, with the modules that ``import ray`` does not load."""
    try:
        # An extra that may not be installed.
        import ray
        import ray.exceptions
        import ray.util.client
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigError(
            f'workers="ray" needs Ray: {error}; pip install "ray[default]>=2.40"'
        ) from error
    return ray


def _amounts(resources: Mapping[str, float]) -> str:
    """The amount of each resource, as ``CPU 4 GPU 1``."""
    return " ".join(f"{kind} {amount:g}" for kind, amount in resources.items())


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
