"""Weights from a folder of safetensors; each worker reads only those of its stages.

Its files may be links, by which the cache of Hugging Face makes a folder out of its blobs. Wherever
they lead, only ordinary files are read, and nothing whose size is not bounded.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from pipedream_rt.checkpoint.layout import INDEX, open_tensors
from pipedream_rt.errors import CheckpointError, ConfigError
from pipedream_rt.models.tensors import in_place_of, named_tensors
from pipedream_rt.schema import printable, read_file, shown
from pipedream_rt.telling import log_of

_log = log_of(__name__)

_SINGLE = "model.safetensors"
"""The file of a folder whose weights are in one file."""

_LARGEST = 1 << 26
"""Bytes that an index may have."""


_UNREADABLE = (
    OSError, ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError,
)  # fmt: skip
"""Errors from reading a file with content that is not as expected."""


_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""The names of dtypes in files of safetensors."""

_KINDS = ({"F64", "F32", "F16", "BF16"}, {"I64", "I32", "I16", "I8"})
"""Dtypes that may be cast to one another when weights are read."""


class _Entry(NamedTuple):
    """A tensor's entry in the header of a file."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Pretrained:
    """Where the weights of a model are.

    Attributes:
        places: By name in the unsplit model, the file of a weight or buffer, and its key there.
        headers: By file, a digest of its keys, shapes and dtypes, and its size in bytes.
    """

    folder: str
    places: dict[str, tuple[str, str]]
    headers: dict[str, tuple[bytes, int]]

    @torch.no_grad()
    def fill(self, part: nn.Module) -> None:
        """Read the weights and buffers of a part, in which they have their names of the model."""
        by_file: dict[str, dict[str, Tensor]] = {}
        for name, tensor in named_tensors(part):
            if name in self.places:
                by_file.setdefault(self.places[name][0], {})[name] = tensor
        values: dict[int, Tensor] = {}
        for file, named in sorted(by_file.items()):
            path = Path(self.folder) / file
            if _header_of(path)[1] != self.headers[file]:
                raise CheckpointError(
                    f"{path} is not the file that the script has seen at its start; all workers "
                    "must see the same files, as long as the run goes on"
                )
            try:
                for name, tensor in named.items():
                    if id(tensor) not in values:
                        # Copied into the strides of the model. An open file stays mapped into
                        # memory, so it is opened anew for each tensor: only one is there twice.
                        like = torch.empty_like(tensor, device="cpu")
                        with open_tensors(path, follow=True) as opened:
                            values[id(tensor)] = like.copy_(opened.get_tensor(self.places[name][1]))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
        give_values(part, lambda tensor: values.get(id(tensor)))


def find_pretrained(folder: Path, model: nn.Module) -> Pretrained:
    """Find the weights of a model in a folder that `transformers` or `Pipeline.save` has written.

    Only headers are read, and the model's tensors need no values. Refuse a folder that lacks a
    weight, or has one of another shape or kind of dtype.
    """
    files: dict[str, str] = {}
    entries: dict[str, _Entry] = {}
    headers = {}
    for file in _files_in(folder):
        found, headers[file] = _header_of(folder / file)
        entries.update(found)
        files.update(dict.fromkeys(found, file))
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in named_tensors(model):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    # Buffers that are not persistent.
    hidden = {name for name, _ in named_tensors(model)} - {*model.state_dict()}
    prefix = getattr(model, "base_model_prefix", "")
    places: dict[str, tuple[str, str]] = {}
    missing: list[str] = []
    wrong: list[str] = []
    for each, all_names in names.items():
        # A tied weight is written under one of its names only.
        there = [k for n in all_names for k in _keys_of(n, prefix) if k in entries]
        if not there:
            may_lack = any(
                re.search(pattern, name)
                for pattern in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
                for name in all_names
            )
            # It keeps the value that the model has, if it has one.
            if tensors[each].is_meta or not (may_lack or all_names[0] in hidden):
                missing.append(all_names[0])
            continue
        key = there[0]
        if misfit := _misfit(entries[key], tensors[each]):
            wrong.append(f"{key} has the {misfit}")
        places.update(dict.fromkeys(all_names, (files[key], key)))
    if wrong or missing:
        what = [*wrong, *(f"there is no {name}" for name in missing)]
        raise ConfigError(
            f"the weights in {folder} are not those of this model: {'; '.join(what[:5])}"
            f"{'; ...' if len(what) > 5 else ''}. "
            f"It has {printable(', '.join([*entries][:5]))}, ..." + _advice(missing, hidden)
        )
    unused = entries.keys() - {key for _, key in places.values()}
    if unused:
        _log.warning("%s has %d weights that the model does not have", folder, len(unused))
    return Pretrained(str(folder), places, headers)


def _misfit(entry: _Entry, tensor: Tensor) -> str:
    """Say how a weight in a file does not fit one of the model; empty if it fits."""
    if entry.shape != tuple(tensor.shape):
        return f"shape {entry.shape}, the model {tuple(tensor.shape)}"
    own = _NAMES.get(tensor.dtype, str(tensor.dtype))
    # Cast within a kind alone: a quantized weight means nothing without its scale.
    same_kind = any(own in kind and entry.dtype in kind for kind in _KINDS)
    if entry.dtype == own or same_kind:
        return ""
    return f"dtype {printable(entry.dtype, 20)}, the model {own}"


def _advice(missing: Collection[str], hidden: Collection[str]) -> str:
    """Return the advice about weights or buffers that are missing."""
    if not any(name in hidden for name in missing):
        return (
            ". If transformers has written the folder, it may use other keys in it than the model "
            "has, as for experts; then give the model with its weights, or a folder of pipe.save"
        )
    return (
        ". A buffer that is in no state dict must have values: build the model in "
        "pipedream_rt.without_values() rather than on the meta device"
    )


def _keys_of(name: str, prefix: str) -> Iterator[str]:
    """Yield the keys that a weight may have: with the prefix of the base model, or without."""
    yield name
    if prefix:
        yield f"{prefix}.{name}"
        if name.startswith(f"{prefix}."):
            yield name.removeprefix(f"{prefix}.")


def _files_in(folder: Path) -> list[str]:
    """Return the names of the files in a folder that have weights."""
    if os.path.lexists(folder / _SINGLE):
        return [_SINGLE]
    try:
        index = json.loads(read_file(folder / INDEX, _LARGEST))
        files = sorted(set(index["weight_map"].values()))
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} has neither {_SINGLE} nor {INDEX}, so there are no weights to read; it must "
            "be a folder that save_pretrained or pipe.save has written"
        ) from None
    except _UNREADABLE as error:
        reason = getattr(error, "strerror", None) or repr(error)
        raise ConfigError(f"{folder / INDEX} cannot be used: {printable(reason)}") from error
    # The index is not trusted: a name must not lead out of the folder, nor to another format.
    for file in files:
        if (
            not isinstance(file, str)
            or Path(file).name != file
            or not file.endswith(".safetensors")
        ):
            raise ConfigError(
                f"{folder / INDEX} names the file {shown(file, 100)}, which is not the "
                "name of a .safetensors file in that folder"
            )
    return files


def _header_of(path: Path) -> tuple[dict[str, _Entry], tuple[bytes, int]]:
    """Return the entries of a file, by key; their digest, and the size in bytes."""
    try:
        with open_tensors(path, follow=True) as file:
            entries = {}
            for key in file.keys():  # noqa: SIM118 - no dict
                tensor = file.get_slice(key)
                entries[key] = _Entry(tuple(tensor.get_shape()), str(tensor.get_dtype()))
        digest = blake2b(repr(sorted(entries.items())).encode(), digest_size=16).digest()
        return entries, (digest, path.stat().st_size)
    except (*_UNREADABLE, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or repr(error)
        raise ConfigError(f"{path} cannot be read: {printable(reason)}") from error


def give_values(module: nn.Module, value_for: Callable[[Tensor], Tensor | None]) -> None:
    """Give parameters and buffers their values; None from ``value_for`` leaves one as it is."""
    made: dict[int, Tensor] = {}  # by id, so that tied weights stay one tensor
    for owner in module.modules():
        for slots in (owner._parameters, owner._buffers):
            entries: Mapping[str, Tensor | None] = dict(slots)
            for name, tensor in entries.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    value = value_for(tensor)
                    made[id(tensor)] = (
                        tensor
                        if value is None
                        else in_place_of(tensor, value, tensor.requires_grad)
                    )
                slots[name] = made[id(tensor)]  # type: ignore[assignment]


def refuse_no_values(model: nn.Module, spared: Collection[int]) -> None:
    """Refuse a tensor on the meta device, but for those that a worker makes, by ``id``."""
    for name, tensor in named_tensors(model):
        if tensor.is_meta and id(tensor) not in spared:
            raise ConfigError(
                f"{name} is on the meta device, where it has no values; give Layout(weights=...), "
                "the folder from which the workers read them, or a model with values"
            )


@contextmanager
def without_values() -> Iterator[None]:
    """Build modules without values in the body: parameters are on the meta device.

    They have shapes alone, so a model of any size fits into memory. Buffers keep their values.
    `Pipeline` takes such a model with a folder, of which each worker reads its part::

        with pipedream_rt.without_values():
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        pipe = Pipeline(model, layout=Layout(weights=folder), stages=8, ...)
    """
    # Not torch.device("meta"): buffers that are in no state dict would lose their values for good.
    before = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            empty = in_place_of(param, param.detach().to("meta"), param.requires_grad)
            param = empty  # type: ignore[assignment]  # of the same class
        before(self, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = before  # type: ignore[method-assign]
