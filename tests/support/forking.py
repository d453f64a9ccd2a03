"""The server of `forked`: it imports torch once, and its children become the scripts of tests.

It computes nothing and has one thread, so a forked child is as an interpreter that has imported
torch and the library. A child leaves the loop below and runs its script at the top of this program,
so that what ends it, and what happens then, is up to the interpreter: `atexit`, threads that are
waited for, exit codes, and the trace of an error.
"""

import builtins
import contextlib
import ctypes
import functools
import gc
import importlib.machinery
import io
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import types
import warnings
from importlib import import_module

IMPORTED = ("torch", "numpy", "pipedream_rt.cli", "pipedream_rt.cluster.worker.process")
OUTPUTS = 3
"""Descriptors 0 to 2, which come with each request; behind them are those of ``pass_fds``."""

MOST_DESCRIPTORS = 16
SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl
COMMAND_LINE = "from pipedream_rt.cli import main; main()"
LIBRARY = "libc10.so"  # where torch has its levels of logging
ERROR = 2


def request_of(connection):
    """The next request, and its descriptors; None if the other end has closed."""
    data, fds, _, _ = socket.recv_fds(connection, 1, MOST_DESCRIPTORS)
    if not data:
        return None
    with open(fds[0], encoding="utf-8") as file:
        return json.load(file), fds[1:]


def send(connection, request, fds):
    """Send a request: a file in memory, since an environment may be longer than a packet."""
    with open(os.memfd_create("request"), "w+", encoding="utf-8") as file:
        json.dump(request, file)
        file.flush()
        file.seek(0)
        socket.send_fds(connection, [b"."], [file.fileno(), *fds])


def serve(connection):
    """Fork a child for each request; return in it, with what it is to become.

    The server ends when the other end is closed, or when its process has died: a process that this
    one has forked may hold the other end open.
    """
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # some handler has to be there
    signal.set_wakeup_fd(wake.fileno())
    parent = os.pidfd_open(os.getppid())
    statuses = {}  # by process: where to tell its exit code
    poll = select.poll()
    for each in (connection, woken, parent):
        poll.register(each, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == woken.fileno():
                woken.recv(4096)
                tell_ends(statuses)
                continue
            found = None if fd == parent else request_of(connection)
            if found is None:
                os._exit(0)
            request, (status, *fds) = found
            with warnings.catch_warnings():  # of BLAS's threads, which only wait
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for each in (connection, woken, wake, *statuses.values()):
                    each.close()
                os.close(status)
                os.close(parent)
                return request, fds
            for each in fds:
                os.close(each)
            statuses[pid] = socket.socket(fileno=status)
            pidfd = os.pidfd_open(pid)  # only this process reaps it, so the number is still its
            with contextlib.suppress(OSError):  # the other end has closed
                socket.send_fds(statuses[pid], [str(pid).encode()], [pidfd])
            os.close(pidfd)


def tell_ends(statuses):
    """Reap the children that have ended, and tell their exit codes."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, code = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            with statuses.pop(pid) as status, contextlib.suppress(OSError):
                status.send(str(os.waitstatus_to_exitcode(code)).encode())


class Spare:
    """A child that waits to become what forks the workers of a script, in place of a new process.

    It is of no use once anything has changed that it has inherited, or libraries read at import.
    """

    def __init__(self, fds):
        self.forked_workers = import_module("pipedream_rt.cluster.forked_workers")
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.request = None
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
            self.connection.close()
            for each in fds:
                os.close(each)
            os.setsid()
            self.request = request_of(theirs) if os.getppid() == parent else None
            if self.request is None:
                os._exit(0)
            ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, 0, 0, 0, 0)
            # torch has read TORCH_CPP_LOG_LEVEL, which the command of a worker sets before.
            level = ctypes.c_int.in_dll(ctypes.CDLL(LIBRARY), "FLAGS_caffe2_log_level")
            level.value = max(level.value, ERROR)
        else:
            self.inherited = self.forked_workers._inherited()
            self.pidfd = os.pidfd_open(self.pid)
            real = {name: getattr(subprocess, name) for name in ("DEVNULL", "TimeoutExpired")}
            self.forked_workers.subprocess = types.SimpleNamespace(Popen=self.start, **real)
        theirs.close()

    def start(self, command, *, env, stdin, pass_fds, start_new_session):
        """Stand for `subprocess.Popen`, once."""
        self.forked_workers.subprocess = subprocess
        if self.inherited != self.forked_workers._inherited():
            os.close(self.pidfd)
            self.connection.close()
            os.waitpid(self.pid, 0)
            return subprocess.Popen(
                command, env=env, stdin=stdin, pass_fds=pass_fds,
                start_new_session=start_new_session,
            )  # fmt: skip
        request = {"args": command, "env": env, "cwd": os.getcwd(), "pass_fds": pass_fds}
        with self.connection, open(os.devnull) as nothing:
            send(self.connection, request, [nothing.fileno(), 1, 2, *pass_fds])
        return Child(command, self.pid, self.pidfd)


class Child:
    """A child of this process, with that of `subprocess.Popen` that the library asks for."""

    def __init__(self, args, pid, pidfd):
        self.args = args
        self.pid = pid
        self._pidfd = pidfd
        self.returncode = None

    def kill(self):
        if self.returncode is None:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def poll(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)

    def wait(self, timeout=None):
        if self.returncode is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._pidfd)
        return self.returncode


def take_place(request, fds):
    """Take on the group, descriptors, environment and folder of a request."""
    if request.get("start_new_session"):
        os.setsid()
    elif os.getsid(0) != os.getpid():
        os.setpgid(0, 0)
    numbers = [*range(OUTPUTS), *request["pass_fds"]]
    high = 1 + max(*numbers, *fds)
    above = [os.dup2(fd, high + place) for place, fd in enumerate(fds)]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(above, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    installed = [each for each in sys.path[1:] if each not in before]
    wanted = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*filter(None, map(os.path.abspath, filter(None, wanted))), *installed]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        # Anew, for what can be told of a descriptor is found out at the start.
        setattr(sys, name, opened(number, getattr(sys, name)))
        setattr(sys, f"__{name}__", getattr(sys, name))
    import_module("numpy").random.seed()  # else all children draw the same numbers
    random.seed()


def opened(number, like):
    """Open a standard stream as an interpreter does that starts."""
    at_once = bool(os.environ.get("PYTHONUNBUFFERED"))
    mode, size = ("wb", 0 if at_once else -1) if number else ("rb", -1)
    binary = open(number, mode, size, closefd=False)  # noqa: SIM115
    by_lines = (number == 2 and not at_once) or binary.isatty()
    return io.TextIOWrapper(
        binary, like.encoding, like.errors, "\n", line_buffering=by_lines, write_through=at_once
    )


class Executed(BaseException):
    """The command line has done nothing yet, and wants to be a script or a worker."""


def let_command_line_execute():
    """Let this process become another program of Python without starting an interpreter."""
    real, path = (os.execv, os.execve), [*sys.path]

    def execute(_, command, environment=None):
        os.execv, os.execve = real  # a worker that has computed needs a new one
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
        sys.path[:] = path
        raise Executed(command)

    os.execv = os.execve = execute


def program_of(command):
    """Make this process that of a command line of Python; return the program, to be called."""
    sys.orig_argv[:] = command
    words = command[1:]
    while words[0] == "-W":
        sys.warnoptions.append(words[1])
        warnings._processoptions(words[1:2])
        words = words[2:]
    main = types.ModuleType("__main__")
    main.__builtins__ = builtins
    if "__annotations__" in globals():  # until Python 3.13
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        sys.path.insert(0, os.getcwd())
        return functools.partial(runpy._run_module_as_main, words[1])
    if words[0] == "-c":
        sys.argv[:] = ["-c", *words[2:]]
        sys.path.insert(0, "")
        code = compile(words[1], "<string>", "exec")
    else:
        sys.argv[:] = words
        main.__file__ = os.path.abspath(words[0])
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", main.__file__)
        main.__cached__ = None
        sys.path.insert(0, os.path.dirname(os.path.realpath(words[0])))
        with open(words[0], "rb") as file:
            code = compile(file.read(), main.__file__, "exec")
    if os.environ.pop("PIPEDREAM_RT_PREPARE", ""):  # read when the library is imported
        import_module("pipedream_rt").prepare()
    return functools.partial(exec, code, vars(main))


if __name__ == "__main__":
    for name in IMPORTED:
        import_module(name)
    gc.collect()
    gc.freeze()  # of what is there no child need look for garbage
    request, fds = serve(socket.socket(fileno=int(sys.argv[1])))
    spare = Spare(fds)
    if spare.pid == 0:
        request, fds = spare.request
    take_place(request, fds)
    command = request["args"]
    if COMMAND_LINE in command:
        let_command_line_execute()
    while command:
        program, command = program_of(command), None
        try:
            program()
        except Executed as executed:
            (command,) = executed.args
        except BaseException as error:  # in its trace this file does not come
            error.__traceback__ = error.__traceback__.tb_next
            raise
