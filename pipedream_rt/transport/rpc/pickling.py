"""The pickler of torch RPC, replaced by one that signs, checks signatures, and has an allow-list.

torch RPC calls functions of a peer by pickling them, and unpickles whatever reaches its port. Its
pickler can be replaced through private names, which `pipedream_rt.torch_private` has. The one
here signs what it writes with the key of the group, and checks the signature before it reads a
byte. A *request*, which calls a function, may name only the functions that `allow` marks. A
*value*, which a request of this process returns, may be of any class, because a stage's module is;
only a member of the group can have signed it.

This is the second wall. The first one is that nobody but a member can send torch RPC anything: see
`pipedream_rt.transport.rpc.tunnel`, whose links say who sends to whom, and in which order.
"""

from __future__ import annotations

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
from pipedream_rt.transport.signing import DIGEST, proof

F = TypeVar("F", bound=Callable[..., Any])

_REQUEST, _VALUE = 0, 1

_ALLOWED: set[tuple[str, str]] = {
    (__name__, "_tensor_at"),
    (__name__, "_rref_of"),
    (internal.PythonUDF.__module__, internal.PythonUDF.__qualname__),
}

_reading = threading.local()


def allow(function: F) -> F:
    """Let peers call a module-level function. A decorator."""
    _ALLOWED.add((function.__module__, function.__qualname__))
    return function


class _Unpickler(pickle.Unpickler):
    """An unpickler that looks up only the names that a request may use."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a global that is allowed."""
        if (module, name) not in _ALLOWED:
            raise TransportError(f"a request names {module}.{name}, which is not allowed")
        return super().find_class(module, name)


def _tensor_at(index: int) -> Tensor:
    """Return a tensor that came beside the pickle."""
    found: Tensor = _reading.tensors[index]
    return found


def _rref_of(fork: Any) -> Any:
    """Return the RRef that a fork describes."""
    return rpc.PyRRef._deserialize(fork)


def _on_host(tensor: Tensor) -> Tensor:
    """Return a tensor, or a copy of it on the host, since the agent knows of no devices.

    Another thread than this one launches what computes it, so all of that is waited for.
    """
    if tensor.is_cpu:
        return tensor
    torch.accelerator.synchronize(tensor.device)
    return tensor.cpu()


def _shape(tensors: list[Tensor]) -> bytes:
    """Return the dtypes and shapes of tensors as bytes, which are signed."""
    return repr([(t.dtype, tuple(t.shape)) for t in tensors]).encode()


class SignedPickler(InternalRpcPickler):
    """The pickler of torch RPC for one generation of a group."""

    def __init__(self, key: bytes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._key = key

    def _signature(self, data: bytes) -> bytes:
        """Return the signature of bytes."""
        return proof(self._key, b"pickle", data)

    def serialize(self, obj: Any) -> tuple[bytes, list[Tensor]]:
        """Return an object as signed bytes, and its tensors."""
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
        """Return the object that signed bytes and tensors hold."""
        signature, data = binary_data[:DIGEST], binary_data[DIGEST:]
        if not hmac.compare_digest(self._signature(data), signature):
            raise TransportError("a message is not signed with the key of this job")
        kind, length = data[0], int.from_bytes(data[1:5], "big")
        if data[5 : 5 + length] != _shape(tensor_table):
            raise TransportError("the tensors that came are not those that were signed")
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
