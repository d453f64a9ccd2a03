"""The endpoint of torch RPC: one in a process, and none where torch RPC is left out."""

from datetime import timedelta

import pytest

from pipedream_rt.errors import ConfigError
from pipedream_rt.transport.group import Group
from pipedream_rt.transport.rpc.endpoint import Endpoint
from pipedream_rt.transport.sockets import SocketTransport


def test_one_endpoint_in_a_process():
    group = Group(generation=1, rank=0, names=("coordinator",), hosts=(), key=b"k" * 32)
    transport = SocketTransport(group)
    first = Endpoint(group, transport.tunnel, timedelta(seconds=20))
    try:
        with pytest.raises(ConfigError, match="has an open pipeline on worker processes already"):
            Endpoint(group, transport.tunnel, timedelta(seconds=20))
    finally:
        first.close()
        transport.close()
