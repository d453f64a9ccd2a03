"""Links of a member, for tests."""

import queue

from pipedream_rt.transport.links import Links


class Member:
    """The links of one member, with what has come and what has ended."""

    def __init__(self, connections):
        self.came, self.lost = queue.SimpleQueue(), queue.SimpleQueue()
        self.links = Links(
            connections,
            lambda rank, frame: self.came.put((rank, frame)),
            lambda rank, reason: self.lost.put((rank, reason)),
        )
