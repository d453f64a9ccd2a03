"""A stranger on the same machine, or on the other one, who knows everything but the secret.

He polls for ports at which the processes of his test listen, by the kernel's table, or tries those
that he is told, and talks to each at once: as a peer of torch RPC that has a file written and a
weight read, as a worker or a member with the certificate of another job or with none, and with
junk. He keeps what he gets open. He never connects to a port of another program, which may be a
test beside his. He says at which port he was, and at the end of his input what he has reached::

    python rogue.py FOLDER [HOST LOW HIGH]
    python rogue.py once PORT FILE      calls the agent at one port, once
"""

import json
import os
import select
import socket
import ssl
import sys
import tempfile
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this file is started as a program

from pipedream_rt.cluster.identity import Secret, _made
from pipedream_rt.cluster.records import VERSION, packed
from pipedream_rt.software import software
from support.family import family

LOOKS = 50
OTHER_JOB = Secret("92e7" + "0" * 60)

WORDS = (
    packed(
        {
            "type": "hello", "job": "0" * 32, "name": "rogue", "pid": 1, "host": "h", "boot": "",
            "software": software(), "returns": True, "version": VERSION,
        }
    ),
    packed(
        {
            "type": "link", "job": "0" * 32, "group": bytes(32), "generation": 1, "sender": 2,
            "recipient": 1,
        }
    ),
)  # fmt: skip

JUNK = (
    b"GET / HTTP/1.1\r\n\r\n",
    b"\0" * 8,
    b"SSH-2.0-x\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\7" * 300,
    WORDS[0],
    WORDS[1],
    bytes(range(256)) * 16,
)


def stranger_of(secret):
    """How a stranger shakes hands: with the certificate of his own job, or with none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # he takes everybody for a member
    if secret is not None:
        with tempfile.NamedTemporaryFile() as file:
            file.write(b"".join(_made(secret)))
            file.flush()
            context.load_cert_chain(file.name)
    return context


def listening():
    """The TCP ports of this machine at which anybody listens, with what tells two sockets apart."""
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A":
            found.add((int(fields[1].rpartition(":")[2], 16), fields[9]))
    return found


def sockets_of_the_test():
    """The inodes of the sockets of the process that started this one and of all below that one."""
    found = set()
    for pid in family(os.getppid()):
        with suppress(OSError):  # it has ended meanwhile
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    kind, _, inode = os.readlink(f"/proc/{pid}/fd/{fd}").partition(":")
                    if kind == "socket":
                        found.add(inode.strip("[]"))
    return found


class Rogue:
    def __init__(self, folder, host="127.0.0.1", ports=()):
        self.folder, self.host, self.ports = Path(folder), host, ports
        self.seen, self.looks = set(listening()), Counter()
        self.tried = self.connected = self.answered = 0
        self.open = []
        self.agents = self.shook_hands = 0
        self.members = [stranger_of(None), stranger_of(OTHER_JOB)]

    def new_ports(self):
        if self.ports:
            return self.ports
        fresh = listening() - self.seen
        of_the_test = sockets_of_the_test() if fresh else ()  # 1 ms: not at each turn
        found = [each for each in fresh if each[1] in of_the_test]
        # A list of children may lack one while others end, so a stranger's port is looked at again.
        self.looks.update(fresh)
        self.seen.update(found, (each for each in fresh if self.looks[each] == LOOKS))
        return [port for port, _ in found]

    def talk(self, port):
        """Connect, send junk, and keep the connections; return those that stand."""
        made = []
        for junk in (*JUNK[self.tried % len(JUNK) :], b""):
            self.tried += 1
            connection = socket.socket()
            connection.settimeout(0.05)
            try:
                connection.connect((self.host, port))
                self.connected += 1
                connection.sendall(junk)
                made.append(connection)
            except OSError:
                connection.close()
                break
        return made

    def keep(self, connections):
        """Keep connections open, and the latest ones alone where there are too many."""
        self.open += connections
        while len(self.open) > 400:
            self.open.pop(0).close()

    def be_a_member(self, port):
        """Shake hands, and say what workers and members say first."""
        for context in self.members:
            for words in WORDS:
                with suppress(OSError), socket.socket() as connection:
                    connection.settimeout(1)
                    connection.connect((self.host, port))
                    with context.wrap_socket(connection) as encrypted:
                        self.shook_hands += 1
                        encrypted.sendall(words)
                        self.answered += len(encrypted.recv(1 << 12)) > 0

    def be_an_agent(self, port):
        """Call as torch RPC does, with two built-in operators, of which one writes a file.

        A process of its own does it: whoever listens there may be no agent at all, and TensorPipe
        ends the process that reads such an answer.
        """
        self.agents += 1
        child = os.fork()
        if child == 0:
            answered = 0
            try:
                path = str(self.folder / f"written-{self.agents}")
                for call in calls(join(self.host, port), path, timeout=1):
                    with suppress(RuntimeError):
                        call.wait()
                        answered += 1
            finally:
                os._exit(answered)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            self.answered += os.WEXITSTATUS(status)

    def still_open(self):
        """How many of his connections the other side has not closed."""
        count = 0
        for connection in self.open:
            try:
                connection.sendall(b"\0")
                readable, _, _ = select.select([connection], [], [], 0.5)
                if not readable or connection.recv(1 << 16):
                    count += 1
            except OSError:
                continue
        return count


def join(host, port):
    """Become a peer of the agent that listens there."""
    import torch.distributed.autograd as autograd
    import torch.distributed.rpc as rpc

    os.environ["TP_SOCKET_IFNAME"] = "lo"
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    autograd._init(1)
    options = rpc.TensorPipeRpcBackendOptions(
        init_method="x://", _transports=["uv"], _channels=["basic"]
    )
    store = _store(f"uv://{host}:{port}".encode())
    agent = rpc.TensorPipeAgent(store, "rogue", 1, 2, options, {}, [])
    rpc.api._init_rpc_states(agent)
    return rpc


def calls(rpc, path, timeout):
    import torch

    return [
        rpc.rpc_async("coordinator", torch.from_file, args=(path, True, 100), timeout=timeout),
        rpc.rpc_async("coordinator", torch.add, args=(torch.ones(1), 1), timeout=timeout),
    ]


def call_once(port, path):
    """Call one agent, and say what came of it."""
    made = calls(join("127.0.0.1", port), path, timeout=15)
    print("called", flush=True)
    for call in made:
        try:
            print("done", call.wait(), flush=True)
        except RuntimeError as error:
            print("refused", str(error).splitlines()[0], flush=True)
    os._exit(0)


def _store(address):
    import torch.distributed as dist

    class Store(dist.Store):
        def __init__(self):
            super().__init__()
            self.known = {"names/0": b"coordinator", "names/1": b"rogue"}
            self.known["addrs/coordinator"] = address

        def set(self, key, value):
            self.known[key] = bytes(value)

        def get(self, key):
            return self.known[key]

        def compare_set(self, key, expected, desired):
            return desired

    return Store()


def main(folder, host="127.0.0.1", low=0, high=0):
    import torch  # noqa: F401 - while nobody waits for it

    rogue = Rogue(folder, host, range(int(low), int(high)))
    print("ready", flush=True)
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    turn = 0
    while not over.is_set():
        for port in rogue.new_ports():
            turn += 1
            made = rogue.talk(port)
            rogue.keep(made)
            if made:
                rogue.be_a_member(port)
            # Where a connection stands, torch's own agent may talk; every third time: it is slow.
            if made and turn % 3 == 0 and not rogue.ports:
                rogue.be_an_agent(port)
            if not rogue.ports:
                print(f"at {port}.", flush=True)
    said = {
        "tried": rogue.tried, "connected": rogue.connected, "agents": rogue.agents,
        "shook_hands": rogue.shook_hands, "answered": rogue.answered,
        "still_open": rogue.still_open(),
    }  # fmt: skip
    print(json.dumps(said), flush=True)
    os._exit(0)


if __name__ == "__main__":
    (call_once if sys.argv[1] == "once" else main)(*sys.argv[2 if sys.argv[1] == "once" else 1 :])
