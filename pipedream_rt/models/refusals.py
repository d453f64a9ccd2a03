"""Refusals of models that would behave differently on stages than in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from pipedream_rt.errors import ConfigError
from pipedream_rt.models.shipping import range_of
from pipedream_rt.models.split import Layers
from pipedream_rt.schema import is_utf8, printable


def refuse_unfit_layers(layers: Layers) -> None:
    """Refuse layers, or a loss among them, that cannot be trained on stages, whatever the split."""
    for name, layer in layers.items():
        for module in layer.modules():
            if isinstance(module, nn.parallel.DistributedDataParallel):
                raise ConfigError(
                    f"{name or 'the model'} is wrapped in {type(module).__name__}, which reduces "
                    "gradients over processes of its own: give model.module; Layout(replicas=...) "
                    "is data parallelism beside the pipeline"
                )
        for key, tensor in tensors_of(layer, name):
            if hasattr(tensor, "device_mesh") and hasattr(tensor, "placements"):
                raise ConfigError(
                    f"{key} is a DTensor, of which other processes have parts, and each stage is "
                    "computed by one process: give Pipeline the model before parallelize_module "
                    "or fully_shard; Layout(replicas=...) is data parallelism beside the pipeline"
                )
            if tensor.layout is not torch.strided:
                raise ConfigError(
                    f"{key} is a tensor of layout {tensor.layout}, which cannot be saved "
                    "and sent; keep its parts, as indices and values, in dense buffers"
                )
            if not is_utf8(key):
                raise ConfigError(
                    f"{printable(key)} is a name with characters that are no Unicode, under which "
                    "no file of weights can hold a tensor; give its module or it another name"
                )
            if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
                raise ConfigError(
                    f"{key} has no shape yet, because a lazy layer takes it from its first "
                    "input; run the model once on a batch before you give it to Pipeline"
                )
    _refuse_overlaps(layers)


def tensors_of(layer: nn.Module, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a layer with their names in the unsplit model."""
    yield from layer.named_parameters(prefix=name)
    yield from layer.named_buffers(prefix=name)


def _refuse_overlaps(layers: Layers) -> None:
    """Refuse two tensors that share memory: a change of one would have to change the other."""
    ranges = {}
    for name, layer in layers.items():
        for key, tensor in tensors_of(layer, name):
            start, end = range_of(tensor)
            if end:
                ranges[id(tensor)] = (start, end, key, tensor)
    last_end, last, last_tensor = 0, "", torch.empty(0, device="cpu")
    for start, end, name, tensor in sorted(ranges.values(), key=lambda r: r[:2]):
        if start < last_end and _overlap(tensor, last_tensor):
            raise ConfigError(
                f"{last} and {name} are two tensors over the same memory, so a change of one would "
                "change the other; on stages each would go its own way. To tie weights, use one "
                "Parameter in both places (b.weight = a.weight); give each buffer its own memory "
                "(clone), or make the view in forward"
            )
        if end > last_end:
            last_end, last, last_tensor = end, name, tensor


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two dense tensors whose ranges of addresses overlap have an element in common."""
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return True
    # Two columns of one matrix overlap in range and share nothing: mark the elements.
    count = one.untyped_storage().nbytes() // one.element_size()
    taken = torch.zeros(count, dtype=torch.bool, device="cpu")
    for each in (one, other):
        part = taken.as_strided(each.shape, each.stride(), each.storage_offset())
        if part.any():
            return True
        part.fill_(True)
    return False


def refuse_loss(loss_fn: Any) -> None:
    """Refuse a loss that is not callable, or is a class of modules."""
    if loss_fn is None:
        return
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        raise ConfigError(
            f"loss_fn is the class {loss_fn.__name__}; give an instance, {loss_fn.__name__}()"
        )
    if not callable(loss_fn):
        raise ConfigError(f"loss_fn must be callable, not {loss_fn!r}")


def shared_buffers(parts: Sequence[nn.Module]) -> list[tuple[str, ...]]:
    """Return, by stage, the names of the buffers that another stage has too; ``parts`` by stage."""
    places: dict[int, list[tuple[int, str]]] = {}
    for stage, part in enumerate(parts):
        for key, buffer in part.named_buffers():
            places.setdefault(id(buffer), []).append((stage, key))
    found: list[list[str]] = [[] for _ in parts]
    for users in places.values():
        if len({stage for stage, _ in users}) > 1:
            for stage, key in users:
                found[stage].append(key)
    return [tuple(names) for names in found]
