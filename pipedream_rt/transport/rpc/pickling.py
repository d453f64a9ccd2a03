"""A pickler for torch RPC that signs, checks signatures, and has an allow-list.

torch RPC calls functions of a peer by pickling them, and unpickles whatever reaches its port. This
pickler takes the place of torch's through private names (`pipedream_rt.torch_private`). It signs
with the key of the group, and checks the signature before it unpickles anything. A *request*, which
calls a function, may name only the functions that `allow` marks. A *value*, which answers a request
of this process, may be of any class, because a stage's module is; only a member of the group can
have signed it.

This is the second wall. The first is the tunnel (`pipedream_rt.transport.rpc.tunnel`), which lets
nobody but members reach torch RPC, and whose links prove who sends, to whom, and in which order.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.distributed.rpc import internal

from pipedream_rt.errors import TransportError
from pipedream_rt.torch_private import InternalRpcPickler, use_pickler

F = TypeVar("F", bound=Callable[..., Any])

_REQUEST, _VALUE = 0, 1

DIGEST = hashlib.sha256().digest_size
"""Bytes of a signature."""

_ALLOWED: set[tuple[str, str]] = {
    (__name__, "_tensor_at"),
    (__name__, "_rref_of"),
    (internal.PythonUDF.__module__, internal.PythonUDF.__qualname__),
}

_reading = threading.local()  # its `tensors`: of the message that the thread unpickles


def allow(function: F) -> F:
    """Let peers call a module-level function. A decorator."""
    _ALLOWED.add((function.__module__, function.__qualname__))
    return function


class _Unpickler(pickle.Unpickler):
    """An unpickler for requests, which looks up only names on the allow-list."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise TransportError(
                f"a request of torch RPC names {module}.{name}, which is not allowed: it may name "
                "only functions marked by `allow`"
            )
        return super().find_class(module, name)


def _tensor_at(index: int) -> Tensor:
    """Return a tensor of the message whose pickle is being read."""
    found: Tensor = _reading.tensors[index]
    return found


def _rref_of(fork: Any) -> Any:
    """Return the RRef that a peer has forked (torch's word for sharing it)."""
    return rpc.PyRRef._deserialize(fork)


def _on_host(tensor: Tensor) -> Tensor:
    """Return a tensor, or a copy of it on the host, since the agent knows of no devices."""
    if tensor.is_cpu:
        return tensor
    # Kernels that another thread has launched may still compute it.
    torch.accelerator.synchronize(tensor.device)
    return tensor.cpu()


def _shape(tensors: list[Tensor]) -> bytes:
    """Return the dtypes and shapes of tensors as bytes to sign."""
    return repr([(t.dtype, tuple(t.shape)) for t in tensors]).encode()


class SignedPickler(InternalRpcPickler):
    """The pickler of torch RPC for one generation of a group."""

    def __init__(self, key: bytes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._key = key

    def _signature(self, data: bytes) -> bytes:
        return hmac.digest(self._key, b"pickle" + data, "sha256")

    def serialize(self, obj: Any) -> tuple[bytes, list[Tensor]]:
        """Return an object as signed bytes, and its tensors.

        The bytes are: signature, kind, length of the shapes (4 bytes), shapes, pickle.
        """
        tensors: list[Tensor] = []

        def reduce_tensor(tensor: Tensor) -> Any:
            tensors.append(_on_host(tensor))
            return _tensor_at, (len(tensors) - 1,)

        def reduce_rref(rref: Any) -> Any:
            return _rref_of, (rref._serialize(),)

        stream = io.BytesIO()
        pickler = pickle.Pickler(stream)
        pickler.dispatch_table = {
            **self._dispatch_table,
            Tensor: reduce_tensor,
            rpc.PyRRef: reduce_rref,
            dist.rpc.RRef: reduce_rref,
        }
        pickler.dump(obj)
        kind = _REQUEST if isinstance(obj, internal.PythonUDF) else _VALUE
        about = _shape(tensors)
        data = bytes([kind]) + len(about).to_bytes(4, "big") + about + stream.getvalue()
        return self._signature(data) + data, tensors

    def deserialize(self, binary_data: bytes, tensor_table: list[Tensor]) -> Any:
        signature, data = binary_data[:DIGEST], binary_data[DIGEST:]
        if not hmac.compare_digest(self._signature(data), signature):
            raise TransportError(
                f"a message of torch RPC with {len(data)} bytes is not signed with the key of this "
                "job: a stranger has sent it, or it was changed on its way"
            )
        kind, length = data[0], int.from_bytes(data[1:5], "big")
        if data[5 : 5 + length] != _shape(tensor_table):
            raise TransportError(
                "the tensors of a message of torch RPC are not those that were signed: their "
                "number, dtypes or shapes differ"
            )
        stream = io.BytesIO(data[5 + length :])
        before = getattr(_reading, "tensors", None)
        _reading.tensors = tensor_table
        try:
            unpickler = _Unpickler(stream) if kind == _REQUEST else pickle.Unpickler(stream)
            return unpickler.load()
        except AttributeError as error:  # returned, as torch's pickler does: the caller raises it
            return error
        finally:
            _reading.tensors = before


def install(key: bytes | None) -> None:
    """Let torch RPC in this process sign with a key; None puts torch's own pickler back."""
    use_pickler(None if key is None else SignedPickler(key))
