"""A backward in two halves: first the gradients of the stage's inputs, later those of its weights.

Below is the autograd graph between the outputs and the inputs of a stage. The *path* is the set of
nodes that lead to an input, here p3, p2 and p1::

    output ── p3 ── p2 ── p1 ── input         first half: runs p3, p2, p1 for the input alone
              │     │     │                   and notes what gradient came to each of them
              w3    w2    w1                  second half: runs each p again, for its weights alone

torch's own nodes compute only the gradients that are asked for, so nothing is computed twice: a
linear layer does one of its two matrix products in each half. The second half ends with one call of
autograd that adds to the weights as a whole backward does: same kernels, same order of sums, same
bits. Nodes off the path, as where a weight is computed from others, run in the second half alone.
Hooks on nodes of the path run in both halves; the gradients that they changed in the first count.

Some graphs cannot be cut in this way:

- If no input asks for a gradient, the second half does everything.
- The first half computes everything, and the second only adds the weights' gradients to the pending
  update, in three cases. A weight is used several times. A node of the path that has weights is an
  autograd Function in Python, as in compiled layers: it computes all its gradients whenever it
  runs, and may not run twice. Or the path has a reentrant checkpoint.
- A backward that draws random numbers both on the path and off it is refused, because cut in two it
  would draw them in another order.

In the first two cases the bits are right too, but no bubble is filled.

torch's own helpers (``torch.distributed.pipelining``) are private, and apply a tensor hook on the
output of a layer twice (2.13).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from pipedream_rt.devices.randomness import has_drawn, random_state, set_random_state
from pipedream_rt.errors import ConfigError

Gradients = tuple[Tensor | None, ...]


@dataclass(slots=True)
class _Replay:
    """The gradients that came to a node in the first half; it gets them again in the second.

    Attributes:
        noted: The gradients, by output of the node; None until some came.
    """

    noted: list[Tensor | None] | None = None
    noting: bool = True

    def hook(self, gradients: Gradients) -> Gradients | None:
        """Note the gradients, or return the noted ones in their place."""
        # A prehook, registered last: what it notes is what the user's hooks have made of the
        # gradients. In the second half these hooks run again, and what they return is replaced.
        if self.noting:
            self.noted = list(gradients)
            return None
        noted = self.noted or []
        kept = (noted[i] if i < len(noted) else None for i in range(len(gradients)))
        return tuple(g if k is None else k for g, k in zip(gradients, kept, strict=True))


@dataclass(frozen=True, slots=True)
class _OnPath:
    """A node of the path with the edges on which the gradients of its weights leave it."""

    node: Node
    edges: list[GradientEdge]
    replay: _Replay = field(default_factory=_Replay)


class SplitBackward:
    """One backward of one micro-batch, in two halves; the caller seeds each with the same seed."""

    def __init__(
        self,
        outputs: Sequence[GradientEdge],
        gradients: Sequence[Tensor],
        inputs: Sequence[Node],
        weights: Sequence[Tensor],
    ) -> None:
        self._roots = list(outputs)
        self._gradients = list(gradients)
        self._inputs = set(inputs)
        self._weights = weights
        self._found: list[Tensor | None] = []
        self._on_path: list[_OnPath] = []
        self._handles: list[Any] = []
        self._drew = False
        nodes = _nodes_under(self._roots)
        self._path = _leading_to(nodes, self._inputs)
        self._together = bool(self._path) and (
            any(self._runs_once(node) for node in self._path) or self._has_shared_weights(nodes)
        )

    def _runs_once(self, node: Node) -> bool:
        """Whether a node of the path may run only once, or only as part of the whole graph."""
        if node in self._inputs or not isinstance(cast(object, node), BackwardCFunction):
            return False
        return bool(self._weights_of(node)) or type(node).__name__ == "CheckpointFunctionBackward"

    def _weights_of(self, node: Node) -> list[GradientEdge]:
        """Return the edges on which gradients of a node leave the path."""
        return [edge for edge in _edges_of(node) if edge.node not in self._path]

    def _has_shared_weights(self, nodes: Sequence[Node]) -> bool:
        """Whether a node off the path has several users, one of them on the path."""
        # As the bias of a layer that runs twice. Autograd could not run one user alone, because it
        # reaches the other one from the weight, and the sum would have another order.
        users: Counter[Node] = Counter(edge.node for edge in self._roots)
        used_on_path: set[Node] = set()
        for node in nodes:
            for following, _ in node.next_functions:
                if following is not None and following not in self._path:
                    users[following] += 1
                    if node in self._path:
                        used_on_path.add(following)
        return any(users[node] > 1 for node in used_on_path)

    def first_half(self) -> None:
        """Compute the gradients of the inputs, which the nodes at the entrance catch."""
        seeded = random_state()
        if self._together:
            torch.autograd.backward(self._roots, self._gradients)
            self._roots = []
        elif self._path:
            self._watch_path()
            self._run_path()
        self._drew = has_drawn(seeded)
        # The gradients of all weights if the graph cannot be cut; else those that an autograd
        # Function has added by a backward of its own. They wait for the second half.
        self._found = [weight.grad for weight in self._weights]
        for weight in self._weights:
            weight.grad = None

    def _run_path(self) -> None:
        """Run the nodes of the path for the inputs alone."""
        on_path = [edge.node in self._path for edge in self._roots]
        # Gradients are asked for at the leaves below the nodes of the inputs, so that these run.
        leaves = [edge for node in self._inputs for edge in _edges_of(node)]
        torch.autograd.grad(
            [edge for edge, there in zip(self._roots, on_path, strict=True) if there],
            leaves,
            [g for g, there in zip(self._gradients, on_path, strict=True) if there],
            retain_graph=True,
            allow_unused=True,
        )

    def _watch_path(self) -> None:
        """Hook those nodes of the path that have weights, to note their gradients."""
        for node in self._path:
            weights = self._weights_of(node)
            if weights and node not in self._inputs:
                entry = _OnPath(node, weights)
                self._on_path.append(entry)
                self._handles.append(node.register_prehook(entry.replay.hook))

    def second_half(self) -> None:
        """Add the gradients of the weights to the ``grad`` of their leaves, and free the graph."""
        for weight, found in zip(self._weights, self._found, strict=True):
            if found is not None:
                weight.grad = found if weight.grad is None else weight.grad + found
        if self._together:
            return
        seeded = random_state()
        edges, gradients = self._off_path()
        set_random_state(seeded)  # hooks that ran again may have drawn
        if edges:
            torch.autograd.backward(edges, gradients)
        if self._drew and has_drawn(seeded):
            raise ConfigError(
                "the backward of this stage draws random numbers both for its input and for its "
                "weights; cut in two halves it would draw them in another order, so use a schedule "
                "that does not split the backward"
            )
        for handle in self._handles:
            handle.remove()
        self._roots, self._on_path, self._path = [], [], {}

    def _off_path(self) -> tuple[list[GradientEdge], list[Tensor]]:
        """Return the edges on which gradients leave the path, with those gradients."""
        edges, gradients = [], []
        for edge, gradient in zip(self._roots, self._gradients, strict=True):
            if edge.node not in self._path:
                edges.append(edge)
                gradients.append(gradient)
        for entry in self._on_path:
            if entry.replay.noted is None:
                continue  # no gradient came this way
            entry.replay.noting = False
            noted = [(i, g) for i, g in enumerate(entry.replay.noted) if g is not None]
            found = torch.autograd.grad(
                [GradientEdge(entry.node, i) for i, _ in noted],
                entry.edges,
                [g for _, g in noted],
                retain_graph=True,
                allow_unused=True,
            )
            for edge, part in zip(entry.edges, found, strict=True):
                if part is not None:
                    edges.append(edge)
                    gradients.append(part)
                    self._keep(edge, part)
        return edges, gradients

    def _keep(self, edge: GradientEdge, gradient: Tensor) -> None:
        """Let a node use a gradient as it is: its hooks, which run again, have changed it."""
        # Leaves of weights have no hooks here: they are refused where a schedule splits backwards.
        if not hasattr(edge.node, "variable"):
            only = [gradient if i == edge.output_nr else None for i in range(edge.output_nr + 1)]
            replay = _Replay(only, noting=False)
            self._handles.append(edge.node.register_prehook(replay.hook))


def _edges_of(node: Node) -> list[GradientEdge]:
    """Return the edges on which the gradients of a node leave it."""
    return [GradientEdge(n, number) for n, number in node.next_functions if n is not None]


def _nodes_under(roots: Sequence[GradientEdge]) -> list[Node]:
    """Return every node below the roots, each after all nodes that it leads to."""
    # Without recursion, since a graph may be deeper than Python's stack.
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(edge.node, False) for edge in roots]
    while stack:
        node, finished = stack.pop()
        if finished:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((n, False) for n, _ in node.next_functions if n is not None)
    return order


def _leading_to(nodes: Sequence[Node], targets: set[Node]) -> dict[Node, None]:
    """Return the targets and the nodes that lead to one, in the order of `_nodes_under`."""
    leads: dict[Node, None] = {}
    for node in nodes:
        if node in targets or any(n in leads for n, _ in node.next_functions):
            leads[node] = None
    return leads
