"""Workers as threads of one process, each with an accelerator as in a process of its own."""

import contextlib
import threading

from pipedream_rt.errors import PipelineClosed
from pipedream_rt.lifecycle import Lifecycle
from pipedream_rt.serial.in_process import ClusterHere
from pipedream_rt.serial.transport import MemoryTransport


class ThreadCluster(ClusterHere):
    """What leaves a device leaves by a thread, and each worker computes on its own thread."""

    def __init__(self, spec):
        super().__init__(spec, MemoryTransport())
        self._life = Lifecycle("the cluster")
        self._threads = []
        for host in self._hosts:
            host._own_process = True
            self._open(host, host.inbox.put, host.inbox.close)
        for host in self._hosts:
            thread = threading.Thread(target=host.serve, name=host.plain_name)
            thread.start()
            self._threads.append(thread)

    def waiting(self):
        return contextlib.nullcontext()

    def close(self):
        if not self._life.begin_closing():
            return
        for host in self._hosts:
            host.inbox.close(PipelineClosed("the end"))
        for thread in self._threads:
            thread.join(60)
        self.transport.close()
        self._life.close()

    kill = close
