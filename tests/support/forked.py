"""Scripts in processes of their own, as of `subprocess`, but forked by one that has imported torch.

    done = forked.run([sys.executable, "script.py", "--steps", "3"], capture_output=True, text=True)

A new interpreter takes two seconds to import torch and the library, and another one does so to fork
workers for the script. Here both are forked by a process that has them, which starts with the first
request. A script is as in a new interpreter, except:

- torch, NumPy, the command line and what a worker needs are imported already, so what a test says
  of imports, or of variables that are read at import, needs a new one;
- all have one seed of hashes, and each a process group of its own;
- the command line in ``/proc`` is that of the server, and no ``sitecustomize`` is read.
"""

import contextlib
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT

from pipedream_rt.cluster.forked_workers import _READ_AT_IMPORT

from .deadlines import LATEST_S
from .forking import send

SERVER = Path(__file__).parent / "forking.py"
TAKEN_ON = ("PYTHONPATH", "PYTHONUNBUFFERED")
"""Variables that are read when an interpreter starts, which a child can make good."""


def inherited(environment):
    """What a process has from its start, and a request cannot change."""
    variables = {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_IMPORT) and name not in TAKEN_ON
    }
    limits = [
        resource.getrlimit(getattr(resource, name))
        for name in dir(resource)
        if name.startswith("RLIMIT_") and name != "RLIMIT_NOFILE"  # the library raises it
    ]
    return variables, limits, os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)


class Server:
    """The process that forks; it starts with the first request, and anew for what is inherited.

    Attributes:
        unfinished: The processes whose end no test has seen yet.
    """

    def __init__(self):
        self._process = self._connection = self._inherited = None
        self.unfinished = set()

    @property
    def pid(self):
        return self._process and self._process.pid

    def running(self):
        """The numbers of the processes that run, and so have to be ended."""
        return {each.pid for each in [*self.unfinished] if each.poll() is None}

    def fork(self, request, fds):
        """Fork a child; return its number, a descriptor of it, and where its end is told."""
        if self._inherited != (wanted := inherited(request["env"])):
            self.close()
            self._start(request["env"])
            self._inherited = wanted
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(LATEST_S)
        with theirs:
            send(self._connection, request, [theirs.fileno(), *fds])
        data, pidfds, _, _ = socket.recv_fds(ours, 32, 1)
        assert data, "the process that forks scripts is gone"
        return int(data), pidfds[0], ours

    def _start(self, environment):
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, SERVER, str(theirs.fileno())], pass_fds=[theirs.fileno()],
                stdin=DEVNULL, stdout=DEVNULL, env=environment, start_new_session=True,
            )  # fmt: skip

    def close(self):
        """End the server; it ends no script."""
        if self._process is not None:
            self._connection.close()
            self._process.wait(LATEST_S)
            self._process = self._inherited = None


server = Server()


class Popen:
    """A process that runs a script, with what tests use of `subprocess.Popen`."""

    def __init__(
        self, args, *, stdin=None, stdout=None, stderr=None, text=False, cwd=None, env=None,
        pass_fds=(), start_new_session=False,
    ):  # fmt: skip
        self.args = args = list(map(os.fspath, args))
        assert args[0] == sys.executable
        self.returncode = None
        kind = "" if text else "b"
        with contextlib.ExitStack() as theirs:
            self.stdin, fd_0 = stream(stdin, 0, "w" + kind, theirs)
            self.stdout, fd_1 = stream(stdout, 1, "r" + kind, theirs)
            self.stderr, fd_2 = (
                (None, fd_1) if stderr == STDOUT else stream(stderr, 2, "r" + kind, theirs)
            )
            request = {
                "args": args, "env": dict(os.environ if env is None else env),
                "cwd": os.path.abspath(cwd or "."), "pass_fds": list(pass_fds),
                "start_new_session": start_new_session,
            }  # fmt: skip
            self.pid, self._pidfd, self._status = server.fork(
                request, [fd_0, fd_1, fd_2, *pass_fds]
            )
        server.unfinished.add(self)

    def poll(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout=None):
        if self.returncode is None:
            self._status.settimeout(LATEST_S if timeout is None else timeout)
            try:
                told = self._status.recv(32)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout) from None
            assert told, "the process that forks scripts is gone"
            self.returncode = int(told)
            self._status.close()
            os.close(self._pidfd)
            server.unfinished.discard(self)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def communicate(self, input=None, timeout=None):
        """Write the input, which fits a pipe; read both outputs to their ends; wait for the end."""
        latest = None if timeout is None else time.monotonic() + timeout
        if self.stdin:
            with contextlib.suppress(BrokenPipeError), self.stdin:
                if input:
                    self.stdin.write(input)
        outputs = {each: b"" for each in (self.stdout, self.stderr) if each}
        with selectors.DefaultSelector() as selector:
            for each in outputs:
                selector.register(each, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(left(latest))
                if not ready:
                    raise subprocess.TimeoutExpired(self.args, timeout)
                for key, _ in ready:
                    data = os.read(key.fd, 1 << 16)
                    outputs[key.fileobj] += data
                    if not data:
                        selector.unregister(key.fileobj)
        self.wait(left(latest))
        return tuple(each and decoded(each, outputs[each]) for each in (self.stdout, self.stderr))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for each in (self.stdout, self.stderr, self.stdin):
            if each:
                each.close()
        self.wait()


def stream(wanted, number, mode, theirs):
    """This end of what one of a process's descriptors is to be, and the descriptor for it.

    The descriptor is closed with ``theirs`` if it was made here.
    """
    if wanted is None:
        return None, number
    if wanted == DEVNULL:
        return None, theirs.enter_context(open(os.devnull, "r+b", buffering=0)).fileno()
    if wanted != PIPE:
        return None, wanted if isinstance(wanted, int) else wanted.fileno()
    reading, writing = os.pipe()
    mine, its = (writing, reading) if mode[0] == "w" else (reading, writing)
    theirs.callback(os.close, its)
    return open(mine, mode), its


def left(latest):
    return None if latest is None else max(0, latest - time.monotonic())


def decoded(output, data):
    """What has been read of an output, as its kind of text."""
    output.close()
    if hasattr(output, "encoding"):
        return data.decode(output.encoding).replace("\r\n", "\n")
    return data


def run(args, *, input=None, capture_output=False, timeout=None, check=False, **options):
    """Run a script to its end, as `subprocess.run` does."""
    if input is not None:
        options["stdin"] = PIPE
    if capture_output:
        options |= {"stdout": PIPE, "stderr": PIPE}
    with Popen(args, **options) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done
