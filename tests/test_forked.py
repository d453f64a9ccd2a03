"""A script that is forked is as one in an interpreter of its own."""

import json
import os
import signal
import socket
import subprocess
import sys
from subprocess import PIPE, STDOUT

import pytest
from support import forked
from support.deadlines import LATEST_S

pytestmark = pytest.mark.processes

FACTS = """
import atexit, json, os, pickle, signal, sys, threading, warnings
class Own: pass
warnings.warn("unheard")
main = sys.modules["__main__"]
facts = {
    "argv": sys.argv, "original": sys.orig_argv, "path": sys.path, "name": __name__,
    "attributes": sorted(vars()), "file": vars().get("__file__"),
    "spec": getattr(__spec__, "name", None),
    "is main": vars(main) is globals(), "own": type(pickle.loads(pickle.dumps(Own()))) is Own,
    "folder": os.getcwd(), "environment": dict(os.environ), "input": sys.stdin.read(),
    "threads": [each.name for each in threading.enumerate()],
    "signals": [str(signal.getsignal(n)) for n in (2, 13, 15, 17)],
    "masked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "streams": [
        (s.encoding, s.errors, s.line_buffering, s.write_through, s.seekable(), s.isatty())
        for s in (sys.stdin, sys.stdout, sys.stderr)
    ],
    "group": os.getpgid(0) == os.getpid(), "session": os.getsid(0) == os.getpid(),
}
print(json.dumps(facts))
atexit.register(print, "at exit")
threading.Thread(target=lambda: (threading.main_thread().join(), print("in a thread"))).start()
"""


@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("words", [["facts.py", "a"], ["-c", FACTS, "-b"], ["-m", "facts", "c"]])
def test_it_finds_what_an_interpreter_of_its_own_would(tmp_path, words, unbuffered):
    (tmp_path / "facts.py").write_text(FACTS)
    environment = {**os.environ, "OWN": "ü", "PYTHONPATH": f"{tmp_path}/x:{tmp_path}/y"}
    environment |= {"PYTHONUNBUFFERED": "1"} if unbuffered else {}
    found = [
        run(
            [sys.executable, "-W", "ignore", *words], cwd=tmp_path, env=environment, input="typed",
            capture_output=True, text=True, timeout=LATEST_S, start_new_session=True, check=True,
        )
        for run in (subprocess.run, forked.run)
    ]  # fmt: skip
    (real, *last), (ours, *our_last) = (each.stdout.splitlines() for each in found)
    assert json.loads(ours) == json.loads(real)
    assert our_last == last == ["in a thread", "at exit"]
    assert [each.stderr for each in found] == ["", ""]


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("sys.exit(5)", 5),
        ("sys.exit('why')", 1),
        ("1 / 0", 1),
        ("os._exit(7)", 7),
        ("os.kill(os.getpid(), 2)", -signal.SIGINT),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("sys.excepthook = lambda *error: print('hook'); 1 / 0", 1),
    ],
)
def test_it_ends_as_an_interpreter_does(end, code):
    words = [sys.executable, "-c", f"import os, sys; print('begins', flush=True); {end}"]
    real, ours = (
        run(words, capture_output=True, text=True, timeout=LATEST_S)
        for run in (subprocess.run, forked.run)
    )
    assert ours.returncode == real.returncode == code
    assert ours.stdout == real.stdout
    assert ours.stderr == real.stderr
    with pytest.raises(subprocess.CalledProcessError):
        forked.run(words, stdout=PIPE, stderr=STDOUT, check=True)


def test_one_that_is_late_is_killed():
    words = [sys.executable, "-c", "import signal; signal.pause()"]
    with pytest.raises(subprocess.TimeoutExpired):
        forked.run(words, timeout=0.01)
    assert not forked.server.running()


def test_one_that_runs_is_known_and_takes_signals():
    """And shares descriptors, and has both outputs in one."""
    ours, theirs = socket.socketpair()
    code = (
        "import signal, socket, sys\n"
        "sys.stdout.write('out '); sys.stdout.flush()\n"
        "sys.stderr.write('error'); sys.stderr.flush()\n"
        "socket.socket(fileno=int(sys.argv[1])).send(b'here')\n"
        "signal.pause()\n"
    )
    with ours, theirs:
        process = forked.Popen(
            [sys.executable, "-c", code, str(theirs.fileno())], pass_fds=[theirs.fileno()],
            stdout=PIPE, stderr=STDOUT,
        )  # fmt: skip
        assert ours.recv(4) == b"here"
    assert forked.server.running() == {process.pid}
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.terminate()
    assert process.communicate(timeout=LATEST_S) == (b"out error", None)
    assert process.returncode == process.wait() == -signal.SIGTERM
    assert not forked.server.running()
    process.kill()  # it says nothing of one that has ended


def test_what_a_child_cannot_take_on_needs_another_server():
    assert forked.inherited({"OMP_NUM_THREADS": "3"}) != forked.inherited({})
    assert forked.inherited({"PYTHONPATH": "x", "HOME": "y"}) == forked.inherited({})
