"""A backward in two halves: first the gradient of the stage's input, the weights' later.

The graph between the outputs and the inputs of a stage, with P the nodes that lead to an input::

    output ── p3 ── p2 ── p1 ── input         first half: runs p3, p2, p1 for the input alone
              │     │     │                   and notes what gradient came to each of them
              w3    w2    w1                  second half: runs each p again, for its weights alone

torch's own nodes compute only the gradients that are asked for, so nothing is computed twice: a
linear layer does one of its two matrix products in each half. The second half ends with one call of
autograd that adds to the weights as a whole backward does: same kernels, same order of sums, same
bits. Nodes off the path between output and input (P's weights may be computed from other weights)
run in the second half alone. Hooks on nodes of P run in both halves; what they change is taken from
the first.

Some graphs cannot be cut so. Where no input wants a gradient, all is done in the second half. Where
a weight is used several times, a node of P with weights is an autograd Function in Python (which
computes all its gradients whenever it runs, and need not bear to run twice; compiled layers are
such), or a checkpoint is reentrant, all is computed in the first half, and added to the pending
update in the second. The bits are right either way; what is lost is the filled bubble. One thing is
refused: a backward that draws random numbers on P and off it. Cut in two, it would draw them in
another order.

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

from pipedream_rt.errors import ConfigError

Gradients = tuple[Tensor | None, ...]


@dataclass(slots=True)
class _Replay:
    """A node that runs in both halves, or gets in the second what came to it in the first.

    A prehook of the node, after all of the user's: what these have made of the gradients is noted
    while ``noting``, and put in the place of what they make of them again afterwards.

    Attributes:
        came: The gradients, by output of the node; None until any came.
        noting: Whether to note, or to replace.
    """

    came: list[Tensor | None] | None = None
    noting: bool = True

    def hook(self, gradients: Gradients) -> Gradients | None:
        """Note or replace."""
        if self.noting:
            self.came = list(gradients)
            return None
        came = self.came or []
        kept = (came[i] if i < len(came) else None for i in range(len(gradients)))
        return tuple(g if k is None else k for g, k in zip(gradients, kept, strict=True))


@dataclass(frozen=True, slots=True)
class _OnPath:
    """A node of P that has weights to serve.

    Attributes:
        node: The node.
        edges: Where its gradients for weights go.
        replay: What comes to it.
    """

    node: Node
    edges: list[GradientEdge]
    replay: _Replay = field(default_factory=_Replay)


class SplitBackward:
    """One backward of one micro-batch, half by half. Seed the generator alike before both.

    Args:
        outputs: Tensors that require a gradient.
        gradients: Theirs; None for one of a scalar.
        inputs: Nodes at which the gradients of the stage's input are caught.
        weights: Leaves that want a gradient.
    """

    def __init__(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        inputs: Sequence[Node],
        weights: Sequence[Tensor],
    ) -> None:
        """Look at the graph."""
        self._roots = [torch.autograd.graph.get_gradient_edge(o) for o in outputs]
        self._gradients = [
            torch.ones_like(o) if g is None else g for o, g in zip(outputs, gradients, strict=True)
        ]
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
        """Whether a node of the path cannot run in both halves, or not within a part of a graph."""
        if node in self._inputs or not isinstance(cast(object, node), BackwardCFunction):
            return False
        return bool(self._weights_of(node)) or type(node).__name__ == "CheckpointFunctionBackward"

    def _weights_of(self, node: Node) -> list[GradientEdge]:
        """Where the gradients of a node leave the path."""
        return [edge for edge in _edges_of(node) if edge.node not in self._path]

    def _has_shared_weights(self, nodes: Sequence[Node]) -> bool:
        """Whether a node off the path has several users, one of them on the path.

        A weight that is used twice, as a bias of a layer that runs twice. To run one of its users
        alone is not possible then (the other is reached from it), nor to sum in the right order.
        """
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
        """Find the gradients of the inputs, which autograd brings to the nodes of the inputs."""
        seeded = torch.get_rng_state()
        if self._together:
            torch.autograd.backward(self._roots, self._gradients)
            self._roots = []
        elif self._path:
            self._watch_path()
            self._run_path()
        self._drew = not torch.equal(seeded, torch.get_rng_state())
        # All of them, or what a Function with a backward inside has found.
        self._found = [weight.grad for weight in self._weights]
        for weight in self._weights:
            weight.grad = None

    def _run_path(self) -> None:
        """Run the nodes of the path for the inputs alone."""
        on_path = [edge.node in self._path for edge in self._roots]
        # To the leaves under the nodes of the inputs, so that these nodes themselves run.
        leaves = [edge for node in self._inputs for edge in _edges_of(node)]
        torch.autograd.grad(
            [edge for edge, there in zip(self._roots, on_path, strict=True) if there],
            leaves,
            [g for g, there in zip(self._gradients, on_path, strict=True) if there],
            retain_graph=True,
            allow_unused=True,
        )

    def _watch_path(self) -> None:
        """Have what comes to the nodes of the path noted, where they have weights."""
        for node in self._path:
            weights = self._weights_of(node)
            if weights and node not in self._inputs:
                place = _OnPath(node, weights)
                self._on_path.append(place)
                self._handles.append(node.register_prehook(place.replay.hook))

    def second_half(self) -> None:
        """Add the gradients of the weights to the ``grad`` of their leaves; frees the graph.

        Raises:
            ConfigError: Random numbers are drawn on the path and off it.
        """
        for weight, found in zip(self._weights, self._found, strict=True):
            if found is not None:
                weight.grad = found if weight.grad is None else weight.grad + found
        if self._together:
            return
        seeded = torch.get_rng_state()
        edges, gradients = self._off_path()
        torch.set_rng_state(seeded)  # hooks that ran again may have drawn
        if edges:
            torch.autograd.backward(edges, gradients)
        if self._drew and not torch.equal(seeded, torch.get_rng_state()):
            raise ConfigError(
                "the backward of this stage draws random numbers for its input and for its weights "
                "apart, which a split backward would draw in another order; use another schedule"
            )
        for handle in self._handles:
            handle.remove()
        self._roots, self._on_path, self._path = [], [], {}

    def _off_path(self) -> tuple[list[GradientEdge], list[Tensor]]:
        """Where the path is left towards weights, and the gradients there."""
        edges, gradients = [], []
        for edge, gradient in zip(self._roots, self._gradients, strict=True):
            if edge.node not in self._path:
                edges.append(edge)
                gradients.append(gradient)
        for place in self._on_path:
            if place.replay.came is None:
                continue  # no gradient came this way
            place.replay.noting = False
            came = [(i, g) for i, g in enumerate(place.replay.came) if g is not None]
            found = torch.autograd.grad(
                [GradientEdge(place.node, i) for i, _ in came],
                place.edges,
                [g for _, g in came],
                retain_graph=True,
                allow_unused=True,
            )
            for edge, part in zip(place.edges, found, strict=True):
                if part is not None:
                    edges.append(edge)
                    gradients.append(part)
                    self._keep(edge, part)
        return edges, gradients

    def _keep(self, edge: GradientEdge, gradient: Tensor) -> None:
        """Have a node off the path run with what its hooks have made already, not hooked twice."""
        if not hasattr(edge.node, "variable"):  # a leaf is ours, and has no hooks
            only = [gradient if i == edge.output_nr else None for i in range(edge.output_nr + 1)]
            replay = _Replay(only, noting=False)
            self._handles.append(edge.node.register_prehook(replay.hook))


def _edges_of(node: Node) -> list[GradientEdge]:
    """Where the gradients of a node go."""
    return [GradientEdge(n, number) for n, number in node.next_functions if n is not None]


def _nodes_under(roots: Sequence[GradientEdge]) -> list[Node]:
    """Every node under the roots, each after all that it leads to.

    Without recursion: a graph may be deeper than Python's stack.
    """
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
    """The nodes from which a target is reached; ``nodes`` as from `_nodes_under`."""
    leads: dict[Node, None] = {}
    for node in nodes:
        if node in targets or any(n in leads for n, _ in node.next_functions):
            leads[node] = None
    return leads
