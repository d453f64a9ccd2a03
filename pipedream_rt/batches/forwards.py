"""What the forwards of a model do, and which of their inputs go to which stage.

There are two ways to cut a model. A *sequence* of layers is cut between two of them, and the output
of a layer passes. Forwards of any other model are recorded (`models/recording.py`): one for each
mode and each signature of the inputs. A signature is the shapes of the inputs and their plain
values. A recorded forward is a program with a number; a stage gets a program together with the
first micro-batch that follows it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from pipedream_rt.batches.items import Batch
from pipedream_rt.errors import ConfigError
from pipedream_rt.messages.head import Mode
from pipedream_rt.messages.tree import Structure, Value
from pipedream_rt.models.cut import StageProgram
from pipedream_rt.packing import packb
from pipedream_rt.schedules.edges import Address


class Followed(NamedTuple):
    """The program that a micro-batch follows.

    Attributes:
        program: Its number; 0 for a sequence.
        labels: The number of labels that the model's own loss is a mean over; None if not known.
        only_labels: Whether that loss is such a mean and nothing else.
        numbers: The numbers of the program that follow from the sizes of its inputs.
    """

    program: int = 0
    labels: int | None = None
    only_labels: bool = False
    numbers: tuple[int, ...] = ()


@dataclass(slots=True)
class Cache:
    """The script's view of the caches of keys and values on the stages.

    Attributes:
        name: The keyword argument of the model that takes the cache.
        value: A cache of `transformers` with the layers of all stages; its tensors have no values.
    """

    name: str
    value: Any

    def grow(self, length: int) -> None:
        """Grow by some positions, as a forward over them does."""
        for layer in self.value.layers:
            if getattr(layer, "keys", None) is not None:
                new = [
                    torch.empty(
                        (*t.shape[:-2], length, t.shape[-1]), dtype=t.dtype, device=t.device
                    )
                    for t in (layer.keys, layer.values)
                ]
                layer.update(*new)


class Forwards(Protocol):
    """What the forwards of a model do.

    Attributes:
        own_loss: Whether the model computes its loss itself.
        returns_loss: Whether there is a loss in what it returns for the example.
        takes_total: Whether its forward has the argument `TOTAL`.
        dtype: The coarsest dtype in which it computes.
        layers: The modules that stay whole, by name; empty for a sequence.
        read: The values that the recorded forward has read of modules, by the names of module and
            attribute.
        definitions: The programs that were recorded since the start, by number, each pickled with
            that and a part for every stage.
    """

    own_loss: bool
    returns_loss: bool
    is_sequence: bool
    takes_total: bool
    dtype: torch.dtype
    layers: dict[str, nn.Module]
    read: dict[tuple[str, str], Any]
    definitions: dict[int, bytes]

    @property
    def how(self) -> str:
        """How the model was cut, in words."""

    def inputs(self, batch: Batch) -> Any:
        """Return the part of a micro-batch that goes to the stages, without its target."""

    def follow(self, inputs: Value, mode: Mode, training: bool | None) -> Followed:
        """Find, or record, the program for the inputs of a micro-batch."""

    def shares(self, program: int, inputs: Value) -> Iterator[Share]:
        """Yield the share of each stage that takes inputs of a micro-batch."""

    def unused(self) -> list[int]:
        """Return the programs that no later micro-batch follows: too many were known.

        They can still be fed again, until `drop` is called.
        """

    def drop(self, program: int) -> None:
        """Forget a program for good."""

    def cached(self, inputs: Value, cache: Cache, length: int) -> int:
        """Find, or record, the program for inputs with a cache, which grows by `length` positions.

        Return its number.
        """

    def stage_programs(self, stage: int) -> tuple[StageProgram, ...]:
        """Return the programs with which a stage begins; none for a sequence of layers."""

    def program(self) -> str:
        """Return the first program as text, stage by stage."""


@dataclass(slots=True)
class SequenceForwards:
    """The forwards of a sequence of layers: one program, which every stage knows."""

    own_loss: bool = False
    returns_loss: bool = False
    is_sequence: bool = True
    takes_total: bool = False
    dtype: torch.dtype = torch.float32  # read only where the model computes its loss itself
    layers: dict[str, nn.Module] = field(default_factory=dict)
    read: dict[tuple[str, str], Any] = field(default_factory=dict)
    definitions: dict[int, bytes] = field(default_factory=dict)

    @property
    def how(self) -> str:
        return "cut between the layers of a sequence"

    def program(self) -> str:
        return "the layers are called one after another"

    def inputs(self, batch: Batch) -> Any:
        if len(batch.args) != 1 or batch.kwargs:
            raise ConfigError(
                "a sequence of layers has one input, as in forward(x); of a loader it takes pairs "
                "(x, y), of which x goes to the first layer; it may be a tuple or a dict: "
                "prepare=lambda item: (item, item['labels']). Several inputs take one module whose "
                "forward has them: prepare=lambda item: ((a, b), {}, y)"
            )
        return batch.args[0]

    def follow(self, inputs: Value, mode: Mode, training: bool | None) -> Followed:
        return Followed()

    def cached(self, inputs: Value, cache: Cache, length: int) -> int:
        raise ConfigError("a sequence of layers has no cache, so it cannot generate")

    def shares(self, program: int, inputs: Value) -> Iterator[Share]:
        yield 0, inputs.structure, inputs.tensors

    def unused(self) -> list[int]:
        return []

    def drop(self, program: int) -> None: ...

    def stage_programs(self, stage: int) -> tuple[StageProgram, ...]:
        return ()


def _key(mode: Mode, training: bool | None, inputs: Value) -> bytes:
    """Return the signature of inputs and of the mode in which the model takes them."""
    of_tensors = [[str(t.dtype), list(t.shape), list(t.stride())] for t in inputs.tensors]
    return _packed_key(mode, training, inputs, of_tensors)


def _key_of_kind(mode: Mode, training: bool | None, inputs: Value) -> bytes:
    """Return the signature of inputs without their sizes."""
    of_tensors = [[str(t.dtype), t.dim(), t.is_contiguous()] for t in inputs.tensors]
    return _packed_key(mode, training, inputs, of_tensors)


def _packed_key(mode: Mode, training: bool | None, inputs: Value, of_tensors: list[Any]) -> bytes:
    """Pack the mode, the plain values in inputs, and what counts of the tensors."""
    how = ["eval"] if mode in EVAL else [mode is Mode.TRAIN, training]
    key: bytes = packb([how, inputs.structure, of_tensors])
    return key


def without_cache(model: nn.Module) -> dict[str, Any]:
    """Return the arguments that keep a Hugging Face model from filling a cache."""
    # Its layers would fill it one after another, and only generation uses it.
    parameters = inspect.signature(model.forward).parameters
    takes = "use_cache" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    config = getattr(model, "config", None)
    return {"use_cache": False} if takes and hasattr(config, "use_cache") else {}


def default_example(model: nn.Module) -> Batch | None:
    """Return the example that a model brings along, as those of Hugging Face do; else None."""
    inputs = getattr(model, "dummy_inputs", None)
    if isinstance(inputs, dict) and all(
        isinstance(v, Tensor | int | bool) for v in inputs.values()
    ):
        return Batch((), dict(inputs), None)
    return None


Share: TypeAlias = tuple[Address, Structure, tuple[Tensor, ...]]
"""A stage's share of the inputs: its address, the structure of a value, its tensors."""


TOTAL = "num_items_in_batch"
"""The argument of a forward that tells a loss the weight of the whole mini-batch."""


EVAL = (Mode.EVALUATE, Mode.EVALUATE_AND_KEEP, Mode.INFER)
