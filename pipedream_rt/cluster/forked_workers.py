"""Local worker processes, forked by a process that has imported torch already.

Importing torch costs more than a second of processor time. The fork server does it once, for the
workers of all pipelines and recoveries of a process. It also imports the installed modules that the
models are built of: those of transformers take longer than torch. It computes nothing, so a forked
worker has the state of a fresh process. It starts with `prepare` or the first pipeline, and ends
with the process that started it. Workers are its children: it reports how they ended, and kills
those that do not notice the death of that process.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

from pipedream_rt.cluster.environment import LISTEN_FD, PROFILE, SECRET
from pipedream_rt.cluster.subprocesses import end_processes
from pipedream_rt.cluster.worker.role import is_worker
from pipedream_rt.cluster.worker_life import WorkerEnd
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import PeerLost, PipelineClosed
from pipedream_rt.lifecycle import Lifecycle, close_in_forked_children
from pipedream_rt.packing import packb, unpackb
from pipedream_rt.telling import log_of

_START_TIMEOUT = timedelta(minutes=2)
"""For the server to import torch and answer for the first time."""

_ANSWER_TIMEOUT = timedelta(seconds=5)
"""For the server to fork a worker once it has torch, which takes milliseconds."""

_REPORT_TIMEOUT = timedelta(seconds=1)
"""For the server to report how a worker ended: at once, unless the server was stopped."""

_EXIT_TIMEOUT = timedelta(seconds=5)
"""For a killed server to be gone."""

_LARGEST_RECORD = 1 << 12
"""Limit of a record of the server, in bytes."""

_LARGEST_REQUEST = 1 << 16
"""Limit of a request, in bytes: a longer one would not fit the buffer of the socket."""

_READ_AT_IMPORT = ("OMP_", "GOMP_", "KMP_", "MKL_", "DNNL_", "ONEDNN_", "OPENBLAS_", "TORCH",
                   "PYTORCH_", "ATEN_", "PYTHON", "LD_", "MALLOC_", "GLIBC_")  # fmt: skip
"""Prefixes of environment variables that libraries read when they are loaded."""

_READ_LATER = ("TORCHINDUCTOR_CACHE_DIR",)
"""Exceptions: torch sets these itself when it imports its compiler, and reads them when used."""

_log = log_of(__name__)


class ForkedWorker:
    """A worker process, as a `Process`. Safe from any thread.

    Attributes:
        returncode: Exit code, negative for a signal as in `subprocess.Popen`. It is
            `WorkerEnd.UNKNOWN` if the server that forked it has ended before it; None while it
            runs.
    """

    def __init__(self, server: ForkServer, parent: socket.socket, pid: int, pidfd: int) -> None:
        self._server = server
        self._parent = parent
        self.pid = pid
        self._pidfd = pidfd
        self._close = weakref.finalize(self, os.close, pidfd)
        self.returncode: int | None = None

    def fileno(self) -> int:
        """Descriptor that is readable once the process has ended; closed by `wait`."""
        return self._pidfd

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send a signal to this process, never to a later one with the same number."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def poll(self) -> int | None:
        """Return the exit code, None while the process runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process."""
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            if not poll.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0)
            self.returncode = self._server.code_of(self.pid, self._parent)
            self._close()
        return self.returncode


class ForkServer:
    """Forks workers. Its process starts with the first request, and again if it has died.

    A worker gets the environment, folder and outputs that this process has when it asks. If
    anything else that is inherited has changed, `prepare` starts another server.
    """

    def __init__(self) -> None:
        self._imports: set[str] = set()
        self._answered = False  # so torch is imported, and answers are quick
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._environment: dict[str, str] = {}
        self._inherited: object = None
        self._codes: dict[int, int] = {}  # exit codes by process number
        self._lock = threading.Lock()
        self._life = Lifecycle("the fork server")

    @property
    def pid(self) -> int | None:
        """The number of the server's process; None while none runs."""
        return None if self._process is None else self._process.pid

    def prepare(self, imports: Iterable[str] = ()) -> None:
        """Start the process before it is needed, so that it imports in the background."""
        with self._lock:
            if self._connection is not None and self._inherited != _inherited():
                self._end()
            if self._connection is None:
                self._start()
            assert self._connection is not None
            if missing := sorted(set(imports) - self._imports):
                self._imports.update(missing)
                with contextlib.suppress(OSError):  # `fork` will notice
                    self._connection.sendall(packb({"imports": missing}))

    def fork(
        self, name: str, threads: int, control: socket.socket, number: int = 0
    ) -> ForkedWorker:
        """Fork a worker that inherits its control connection."""
        wanted = {"name": name, "threads": threads, "number": number}
        return self._fork(wanted, control.fileno())

    def fork_joining(
        self,
        address: str,
        name: str,
        threads: int,
        secret: int,
        *,
        bind: str,
        timeout: timedelta,
        number: int,
    ) -> ForkedWorker:
        """Fork a worker that joins one coordinator after another; ``secret`` is a descriptor."""
        join = {
            "address": address,
            "bind": bind,
            "timeout_s": timeout.total_seconds(),
        }
        wanted = {"name": name, "threads": threads, "join": join, "number": number}
        return self._fork(wanted, secret)

    def _fork(self, wanted: dict[str, Any], fd: int) -> ForkedWorker:
        """Ask the server for a process that gets a descriptor; once more if the server is gone."""
        for last in (False, True):
            with self._lock:
                try:
                    connection = self._connection or self._start()
                    request = packb({**wanted, **self._changes()})
                    if len(request) > _LARGEST_REQUEST:
                        raise PeerLost(
                            f"the request for a worker has {len(request)} bytes, most of them "
                            f"changed environment variables, and {_LARGEST_REQUEST} fit; unset "
                            "large ones",
                            peer="fork server",
                        )
                    socket.send_fds(connection, [request], [fd, *_outputs()])
                    return ForkedWorker(self, connection, *self._answer(connection))
                except (OSError, PeerLost) as error:
                    gone = error
                    if isinstance(error, OSError):
                        what = "cannot be started" if self._connection is None else "is gone"
                        text = f"the process that forks workers {what}: {error}"
                        gone = PeerLost(text, peer="fork server")
                    if last or not self._life.is_open:
                        raise gone from error
                    _log.warning("%s; another one is started", gone)
                    self._end()
        raise AssertionError("the second attempt returns or raises")

    def _changes(self) -> dict[str, Any]:
        """The changes of this process since the server was started."""
        now, then = _environment(), self._environment
        return {
            "cwd": _folder(),
            "set": {name: value for name, value in now.items() if then.get(name) != value},
            "unset": sorted(then.keys() - now.keys()),
        }

    def _start(self) -> socket.socket:
        """Start the server in a session of its own: Ctrl-C reaches the coordinator alone."""
        if not self._life.is_open:
            raise PipelineClosed("the fork server was closed")
        self._environment, self._inherited = _environment(), _inherited()
        # One packet is one record, so no reader waits for the rest of one.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            fd = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipedream_rt.workers", "--fork-server-fd", str(fd)],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                pass_fds=(fd,),
                start_new_session=True,
            )
            undo.pop_all()
        close_in_forked_children(ours)
        self._connection, self._codes, self._answered = ours, {}, False
        if not self._life.is_open:  # since then: `close` has seen no process, and waits
            raise PipelineClosed("the fork server was closed")
        if self._imports:  # asked of the server before this one
            with contextlib.suppress(OSError):  # it has ended already, which `fork` will notice
                ours.sendall(packb({"imports": sorted(self._imports)}))
        return ours

    def _answer(self, connection: socket.socket) -> tuple[int, int]:
        """Wait for the pid and pidfd of the new worker; note meanwhile how others ended."""
        deadline = Deadline(_ANSWER_TIMEOUT if self._answered else _START_TIMEOUT)
        while True:
            record, fds = self._receive(connection, deadline)
            if "pid" in record:
                self._answered = True
                self._codes.pop(record["pid"], None)  # of an earlier worker with the same number
                return record["pid"], fds[0]

    def _receive(
        self, connection: socket.socket, deadline: Deadline
    ) -> tuple[dict[str, int], list[int]]:
        """Receive one record with its descriptors; note how a worker ended if it says so."""
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        if not poll.poll(1000 * (deadline.remaining_s() or 0.0)):
            raise PeerLost("the process that forks workers does not answer", peer="fork server")
        data, fds, _, _ = socket.recv_fds(connection, _LARGEST_RECORD, 1)
        if not data:
            raise PeerLost("the process that forks workers is gone", peer="fork server")
        record = unpackb(data)
        if "ended" in record:
            self._codes[record["ended"]] = record["code"]
        return record, fds

    def code_of(self, pid: int, parent: socket.socket) -> int:
        """Exit code of a worker that has ended; negative for a signal, or `WorkerEnd.UNKNOWN`."""
        deadline = Deadline(_REPORT_TIMEOUT)
        with self._lock:
            while pid not in self._codes and self._connection is parent:
                try:
                    self._receive(parent, deadline)
                except (OSError, PeerLost):  # it was stopped, or is gone: the next one is better
                    self._end()
            # Several threads may ask, so the code stays in the dict. The dict is the present
            # server's: there a pid of an earlier server may be another worker's.
            unknown = WorkerEnd.UNKNOWN
            return self._codes.get(pid, unknown) if self._connection is parent else unknown

    def open_end(self) -> int | None:
        """Return a pidfd of the server, for the caller to close; None before its first fork."""
        with self._lock:
            if self._process is None or not self._answered or self._process.poll() is not None:
                return None
            return os.pidfd_open(self._process.pid)

    def replace(self) -> None:
        """Start another server in the place of one that has ended."""
        # It imports torch while the workers go on, and is ready once one has to be replaced.
        with self._lock:
            ended = self._process is not None and self._process.poll() is not None
            if ended and self._life.is_open:  # it is closed at exit, perhaps before pipelines are
                _log.warning("the process that forks workers is gone; another one is started")
                self._end()
                with contextlib.suppress(OSError, PipelineClosed):  # `fork` will say it
                    self._start()

    def close(self) -> None:
        """End the server; it ends no workers. Idempotent."""
        self._life.begin_closing()
        if (process := self._process) is not None:
            process.kill()  # so that nobody who has the lock waits for its answer
        with self._lock:
            self._end()
        self._life.close()

    def _end(self) -> None:
        """End the process of the server, if one runs; it ends no workers."""
        if self._process is not None:
            # Before its connection is closed, which would tell it that this process is dead.
            self._process.kill()
            end_processes([self._process], Deadline(_EXIT_TIMEOUT))
            self._process = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _inherited() -> object:
    """What the server has inherited, and its requests cannot change for a worker."""
    limits = [
        resource.getrlimit(number)
        for name, number in sorted(vars(resource).items())
        if name.startswith("RLIMIT_") and number != resource.RLIMIT_NOFILE  # `limits.py`
    ]
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_READ_AT_IMPORT) and name not in _READ_LATER
    }
    return variables, os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0), limits


def _environment() -> dict[str, str]:
    """The environment for workers: that of this process without the secret."""
    return {name: value for name, value in os.environ.items() if name != SECRET}


def _folder() -> str | None:
    """Return the current folder; None if it is gone."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _outputs() -> list[int]:
    """Return the descriptors of standard output and standard error, if both are open."""
    try:
        return [os.fstat(fd) and fd for fd in (1, 2)]
    except OSError:
        return []


_of_process: tuple[int, ForkServer] | None = None
"""Pid and fork server of this process: a forked child starts one of its own."""


def fork_server() -> ForkServer:
    """Return the fork server of this process, made at the first call and closed at exit."""
    global _of_process
    if _of_process is None or _of_process[0] != os.getpid():
        _of_process = os.getpid(), ForkServer()
        atexit.register(_of_process[1].close)
    return _of_process[1]


def prepare() -> None:
    """Start the process that forks local workers, so that it imports torch while the script does.

    The first pipeline on local workers opens by about a second sooner then, which is the time that
    it takes to import torch, and what else the script imports of installed packages that build on
    it. Call it at the top of the script, before those imports. `pipedream-rt run` and
    `PipelineTrainer` do it by themselves. It does nothing where workers are started elsewhere. The
    process ends with the script.
    """
    launched = (LISTEN_FD, PROFILE, "RANK", "SLURM_PROCID")
    if not is_worker() and not any(name in os.environ for name in launched):
        program = getattr(sys.modules["__main__"], "__file__", None)
        with contextlib.suppress(OSError):  # a pipeline will say it, if there is one
            fork_server().prepare(imports_of(program) if program else ())


def installed_modules(objects: Iterable[object], compiles: bool = False) -> list[str]:
    """Return the installed modules that define classes of objects, and perhaps torch's compiler."""
    # The user's own modules are left out, as their import may do anything; and torch, which is
    # imported in any case, except its compiler.
    roots = tuple({sysconfig.get_path(kind) + os.sep for kind in ("purelib", "platlib")})
    names = {type(each).__module__ for each in objects}
    files = {name: getattr(sys.modules.get(name), "__file__", None) or "" for name in names}
    ours = ("torch.", "pipedream_rt.")
    found = {n for n, f in files.items() if f.startswith(roots) and not n.startswith(ours)}
    if compiles or any(name.startswith(COMPILER) for name in names):
        found.add(COMPILER)
    return sorted(found)


_LARGEST_SOURCE = 1 << 20
"""Limit of the source that is read, in bytes."""


COMPILER = "torch._dynamo"
"""The module of torch's compiler, which takes as long to import as torch."""


_OURS = ("torch", "pipedream_rt")
"""Packages that workers have imported in any case."""


_NOT_AT_ONCE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def imports_of(program: str | Path) -> list[str]:
    """Imports of a program at its start, of installed packages that build on torch."""
    with suppress(OSError, ValueError, SyntaxError, RecursionError):
        path = Path(program)
        if path.stat().st_size <= _LARGEST_SOURCE:
            tree = ast.parse(path.read_bytes())
            found = dict.fromkeys(_imported(tree))
            roots = {root: _builds_on_torch(root) for root in map(_root_of, found)}
            compiler = [COMPILER] * any(map(_needs_compiler, ast.walk(tree)))
            return [*(name for name in found if roots[_root_of(name)]), *compiler]
    return []


def _imported(tree: ast.AST) -> Iterator[str]:
    """Yield what a program imports when it is run, outside of functions and classes."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}:{alias.name}" for alias in node.names)
        elif not isinstance(node, _NOT_AT_ONCE):
            yield from _imported(node)


def _needs_compiler(node: ast.AST) -> bool:
    """Whether workers need torch's compiler for this; recomputed activations need it too."""
    match node:
        case ast.keyword(arg="compile" | "recompute", value=value):
            return not isinstance(value, ast.Constant) or bool(value.value)
        case ast.ImportFrom(module="torch.utils.checkpoint"):
            return True
    return False


def _root_of(name: str) -> str:
    return re.split("[.:]", name)[0]


def _builds_on_torch(package: str) -> bool:
    """Whether an installed package requires torch, if only for an extra."""
    if package in _OURS:
        return False
    with suppress(metadata.PackageNotFoundError, ValueError):
        needs = metadata.distribution(package).requires or ()
        return any(re.match(r"torch(?![\w.-])", each) for each in needs)
    return False
