"""The endpoint of torch RPC: one in a process, and none where torch RPC is left out."""

from contextlib import closing
from datetime import timedelta

import pytest
from torch.distributed.rpc import internal

from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import ConfigError, PipelineError
from pipedream_rt.transport.fence import NoEndpoint
from pipedream_rt.transport.group import Group
from pipedream_rt.transport.rpc import endpoint
from pipedream_rt.transport.rpc.endpoint import Directory, RPCEndpoint
from pipedream_rt.transport.rpc.pickling import install
from pipedream_rt.transport.sockets import SocketTransport

GROUP = Group(generation=1, rank=0, names=("coordinator", "w0"), hosts=(1, 1), key=b"k" * 32)
SOON = timedelta(seconds=20)


class Ports:
    """What an endpoint asks of its tunnel; it notes the port of the agent."""

    def __init__(self):
        self.guarded = []

    def address_of(self, rank):
        return f"uv://127.0.0.1:{1000 + rank}"

    def guard(self, port):
        self.guarded.append(port)


@pytest.fixture
def opened():
    """Makes endpoints, which are closed afterwards, so that a test that fails leaves none open."""
    made = []

    def make():
        made.append(RPCEndpoint(SOON))
        return made[-1]

    yield make
    for each in made:
        each.close()
    install(None)


def refused():
    """Whether another endpoint is refused, by the words that it is refused with."""
    with pytest.raises(ConfigError, match="has an open pipeline on worker processes"):
        RPCEndpoint(SOON)
    return True


def test_one_endpoint_in_a_process(opened):
    first = opened()
    assert refused()
    first.close()
    opened().close()


def test_an_endpoint_that_is_closed_twice_leaves_the_next_one_alone(opened):
    first = opened()
    first.close()
    opened()
    first.close()
    assert refused()


def test_no_agent_stays_behind_where_it_was_closed_before_it_joined(opened):
    made = opened()
    with closing(SocketTransport(GROUP)) as transport:
        made.carry(GROUP, transport)
        made.close()
        with pytest.raises(PipelineError, match="was closed while it joined the group"):
            made.join("fenced", Deadline(SOON))


def test_the_agent_of_somebody_else_is_left_alone(opened, monkeypatch):
    """That of a script, where the pipeline has none in the end."""
    monkeypatch.setattr(endpoint, "is_rpc_agent_set", lambda: True)
    monkeypatch.setattr(endpoint.rpc, "shutdown", pytest.fail)
    opened().close()


def test_parts_are_asked_of_the_stage_that_was_exposed(opened):
    made = opened()
    for address in (3, 4):
        made.expose(address, lambda name, address=address: (address, name))
    assert made.part(4, "module") == (4, "module")


def test_a_peer_gets_parts_of_the_open_endpoint_and_none_of_a_closed_one(opened):
    made = opened()
    made.expose(3, lambda name: f"the {name}")
    assert endpoint._part(3, "module") == "the module"
    made.close()
    with pytest.raises(PipelineError, match="no endpoint is open"):
        endpoint._part(3, "module")


def test_an_endpoint_that_is_closed_puts_the_pickler_of_torch_back(opened):
    before = internal._internal_rpc_pickler
    made = opened()
    install(GROUP.key)
    assert internal._internal_rpc_pickler is not before
    made.close()
    assert internal._internal_rpc_pickler is before


def test_an_agent_finds_all_names_and_the_gates_that_lead_to_them():
    """It asks for nothing that has to come first, so it never waits."""
    ports = Ports()
    found = Directory(GROUP, ports)
    assert [found.get(f"names/{rank}") for rank in (0, 1)] == [b"coordinator", b"w0"]
    assert found.get("addrs/w0") == b"uv://127.0.0.1:1001"
    found.set("names/1", b"w1")
    assert found.get("names/1") == b"w0"
    assert ports.guarded == []


def test_the_port_of_an_agent_is_guarded_as_soon_as_it_is_said():
    ports = Ports()
    found = Directory(GROUP, ports)
    found.set("addrs/coordinator", b"uv://127.0.0.1:4567")
    assert ports.guarded == [4567]
    assert found.get("addrs/coordinator") == b"uv://127.0.0.1:4567"


@pytest.mark.parametrize("ask", ["reference", "parameter_references"])
def test_without_torch_rpc_a_reference_is_refused_with_the_reason(ask):
    arguments = (0, "module") if ask == "reference" else (0,)
    with pytest.raises(ConfigError, match=r"needs torch RPC, .*; no fence here\. pipe\.module\(\)"):
        getattr(NoEndpoint("no fence here"), ask)(*arguments)
