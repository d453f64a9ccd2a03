"""Two network namespaces joined by a cable (a veth pair), which are two machines to every socket.

The addresses exist inside the namespaces alone. Making them needs root, ``ip`` and the right to
make namespaces; `why_not` says what is missing.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager

from .deadlines import LATEST_S

A, B = "10.77.0.1", "10.77.0.2"
A6, B6 = "fd77::1", "fd77::2"
SECRET = "4c81d" + "0" * 59
OTHER_SECRET = "92e7" + "0" * 60


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=LATEST_S)


def why_not():
    """Why this machine cannot pretend to be two; empty if it can."""
    if shutil.which("ip") is None:
        return "two network namespaces need the command ip (package iproute2)"
    name = f"p{os.getpid() % 100000}t"
    try:
        ip("netns", "add", name)
        try:
            ip("-n", name, "link", "add", "ethT", "type", "veth", "peer", "name", "ethU")
        finally:
            ip("netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"
    return ""


class Child:
    """A process on one of the two machines, whose output is read on a thread of its own."""

    def __init__(self, command, environment, popen=subprocess.Popen):
        self.process = popen(
            command, env=environment, text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.lines = []
        self._seen = 0
        self._came = threading.Condition()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    @property
    def pid(self):
        return self.process.pid

    @property
    def text(self):
        return "\n".join(self.lines)

    def _read(self):
        for line in self.process.stdout:
            with self._came:
                self.lines.append(line.rstrip("\n"))
                self._came.notify_all()
        with self._came:
            self.lines.append("(end)")
            self._came.notify_all()

    def wait_for(self, words, timeout=LATEST_S):
        """Wait for a line that has the words, after the one waited for last, and return it."""

        def found():
            lines = enumerate(self.lines[self._seen :], self._seen)
            return next((number for number, line in lines if words in line), None)

        with self._came:
            self._came.wait_for(lambda: found() is not None or "(end)" in self.lines, timeout)
            number = found()
            assert number is not None, f"no line with {words!r} came:\n{self.text}"
            self._seen = number + 1
            return self.lines[number]

    def go_on(self):
        """Answer a script that waits for a line."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def signal(self, number):
        os.kill(self.pid, number)

    def ended(self, timeout=LATEST_S):
        """Wait for the end, and for the last line, and return the exit code."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end:\n{self.text}") from None
        self._thread.join(timeout)
        return code

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.process.stdin.close()
        self._thread.join()
        self.process.stdout.close()


class TwoHosts:
    """The two machines, ``a`` and ``b``."""

    def __init__(self):
        self._prefix = f"p{os.getpid() % 100000}"
        self._children = ExitStack()
        self._loads = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

    def start(self, host, *command, secret=SECRET, **more):
        """Start Python on a machine."""
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith("PIPEDREAM_RT_")
        }
        environment.update(more, PYTHONUNBUFFERED="1")
        if secret is not None:
            environment["PIPEDREAM_RT_SECRET"] = secret
        within = ["ip", "netns", "exec", f"{self._prefix}{host}"]
        child = Child([*within, sys.executable, *command], environment)
        self._children.callback(child.close)
        return child

    def worker(self, host, name, address, *options, secret=SECRET, bind=True, **more):
        """Start a worker on a machine."""
        bound = ["--bind", f"eth{host.upper()}"] if bind else []
        command = ["-m", "pipedream_rt.workers", address, "--name", name, *bound, *options]
        return self.start(host, *command, secret=secret, **more)

    def cut(self):
        """Take the cable out."""
        ip("-n", f"{self._prefix}a", "link", "set", "ethA", "down")

    def heal(self):
        """Put the cable in again; the kernel has dropped the IPv6 address with it."""
        ip("-n", f"{self._prefix}a", "link", "set", "ethA", "up")
        ip("-n", f"{self._prefix}a", "addr", "replace", f"{A6}/64", "dev", "ethA", "nodad")

    def slow(self, rate):
        """Let the cable carry so much at most, as ``100mbit``, each way."""
        for host in "ab":
            subprocess.run(
                ["tc", "-n", f"{self._prefix}{host}", "qdisc", "add", "dev", f"eth{host.upper()}",
                 "root", "tbf", "rate", rate, "burst", "64kb", "latency", "400ms"],
                check=True, capture_output=True, timeout=LATEST_S,
            )  # fmt: skip

    def add_card(self, host, device, address):
        """Give a machine a card with an address in a network that nobody else is in."""
        name = f"{self._prefix}{host}"
        ip("-n", name, "link", "add", device, "type", "veth", "peer", "name", f"{device}x")
        ip("-n", name, "addr", "add", address, "dev", device)
        for each in (device, f"{device}x"):
            ip("-n", name, "link", "set", each, "up")

    def few_ports(self, host, low, high):
        """Have a machine choose its ports among a few, so that somebody can try all of them."""
        setting = f"net.ipv4.ip_local_port_range={low} {high}"
        ip("netns", "exec", f"{self._prefix}{host}", "sysctl", "-w", setting)

    def forget(self, host, address, length):
        """Take an address from a machine."""
        device = f"eth{host.upper()}"
        ip("-n", f"{self._prefix}{host}", "addr", "del", f"{address}/{length}", "dev", device)

    def up(self):
        a, b = f"{self._prefix}a", f"{self._prefix}b"
        ip("netns", "add", a)
        ip("netns", "add", b)
        ip("link", "add", "ethA", "netns", a, "type", "veth", "peer", "name", "ethB", "netns", b)
        for name, device, four, six in ((a, "ethA", A, A6), (b, "ethB", B, B6)):
            ip("-n", name, "addr", "add", f"{four}/24", "dev", device)
            ip("-n", name, "addr", "add", f"{six}/64", "dev", device, "nodad")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", device, "up")

    def down(self):
        self._children.close()
        for host in "ab":
            subprocess.run(
                ["ip", "netns", "del", f"{self._prefix}{host}"],
                capture_output=True,
                timeout=LATEST_S,
            )


@contextmanager
def two_hosts():
    hosts = TwoHosts()
    try:
        hosts.up()
        yield hosts
    finally:
        hosts.down()


KILL, STOP, CONT = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT
