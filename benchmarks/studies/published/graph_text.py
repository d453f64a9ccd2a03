r"""The ``graph.txt`` of the original PipeDream's profiler, read as a profile.

A line for each node, and then, after a tab, a line for each edge::

    node4 -- ReLU(inplace) -- forward_compute_time=0.709, backward_compute_time=0.734,
    activation_size=2097152.000, parameter_size=0.000
    \tnode3 -- node4

where the first two are one line. Times are in milliseconds, sizes in bytes; a list of sizes,
``[8.0; 4.0]``, is added up. The format does not split a backward, so half of it counts as that for
the input. As in the original planner, sources called ``Input`` and sinks called ``__getitem__`` are
left out.

Source: graph/graph.py and profiler/ of https://github.com/msr-fiddle/pipedream.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable

from pipedream_rt.errors import ConfigError
from pipedream_rt.planning.profile import LayerCosts, Profile
from pipedream_rt.schema import printable

_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_NUMBER = re.compile(r"\d+")


def parse(text: str) -> Profile:
    """Return the profile in the text of a ``graph.txt``."""
    nodes: dict[str, tuple[str, LayerCosts]] = {}
    edges: list[tuple[str, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        parts = [part.strip() for part in line.split(" -- ")]
        if not line.strip():
            continue
        if line.startswith("\t"):
            if len(parts) != 2 or not {*parts} <= nodes.keys():
                raise ConfigError(f"line {number} is no edge between two nodes: {_shown(line)}")
            edges.append((parts[0], parts[1]))
        elif len(parts) < 3 or parts[0] in nodes:
            raise ConfigError(f"line {number} is no new node of a graph.txt: {_shown(line)}")
        else:
            nodes[parts[0]] = (parts[1], _costs(parts, number))
    if not nodes:
        raise ConfigError("there is no node in it")
    with_edge = {consumer for _, consumer in edges}
    _leave_out(nodes, edges, {
        node for node, (what, _) in nodes.items()
        if what.startswith("Input") and node not in with_edge
    })  # fmt: skip
    with_edge = {producer for producer, _ in edges}
    _leave_out(nodes, edges, {
        node for node, (what, _) in nodes.items()
        if what.startswith("__getitem__") and node not in with_edge
    })  # fmt: skip
    order = _sorted(list(nodes), edges)
    index = {node: i for i, node in enumerate(order)}
    return Profile(
        layers=tuple(nodes[node][1] for node in order),
        edges=tuple((index[a], index[b]) for a, b in edges),
        facts={"format": "graph.txt"},
    )


def _shown(line: str) -> str:
    """Return a line as an error shows it."""
    return printable(repr(line), 80)


def _costs(parts: list[str], number: int) -> LayerCosts:
    """Return the costs on the line of a node, given in parts."""
    node, what, fields, *_ = parts
    found = dict(part.partition("=")[::2] for part in fields.split(", "))
    try:
        forward, backward, output, parameters = (
            sum(map(float, found[name].strip("[]").split("; "))) for name in _FIELDS
        )
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"line {number} must have numbers for {', '.join(_FIELDS)}: {_shown(fields)}"
        ) from error
    return LayerCosts(
        name=f"{node} {what}",
        forward=forward / 1e3,  # from milliseconds
        backward_input=backward / 2e3,
        backward_weight=backward / 2e3,
        output_bytes=output,
        saved_bytes=output,
        parameter_bytes=parameters,
    )


def _leave_out(
    nodes: dict[str, tuple[str, LayerCosts]], edges: list[tuple[str, str]], gone: set[str]
) -> None:
    """Remove nodes with their edges, if others are left."""
    if len(gone) == len(nodes):
        raise ConfigError("every node is an Input or a __getitem__: no layer is left")
    for node in gone:
        del nodes[node]
    edges[:] = [edge for edge in edges if gone.isdisjoint(edge)]


def _sorted(nodes: list[str], edges: Iterable[tuple[str, str]]) -> list[str]:
    """Return the nodes in an order in which every edge goes forwards."""
    consumers: dict[str, list[str]] = {node: [] for node in nodes}
    missing = dict.fromkeys(nodes, 0)
    for producer, consumer in set(edges):
        consumers[producer].append(consumer)
        missing[consumer] += 1
    place = {node: i for i, node in enumerate(nodes)}
    first = next((node for node in nodes if not missing[node]), None)

    # The first source of the file comes first. Of several nodes that could come next, take the one
    # with the smallest number: the profiler has numbered them in the order of execution.

    def key(node: str) -> tuple[int, int, int]:
        found = _NUMBER.search(node)
        return (node != first, int(found[0]) if found else 0, place[node])

    ready = [(key(node), node) for node in nodes if not missing[node]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, node = heapq.heappop(ready)
        order.append(node)
        for consumer in consumers[node]:
            missing[consumer] -= 1
            if not missing[consumer]:
                heapq.heappush(ready, (key(consumer), consumer))
    if len(order) < len(nodes):
        circle = min(node for node in nodes if missing[node])
        raise ConfigError(f"the edges form a circle, in which {printable(circle, 40)} is")
    return order
