"""What torch RPC pickles, signed, and unpickled by an allow-list.

torch RPC calls functions of a peer by pickling them, and unpickles whatever reaches its port. Its
pickler can be replaced by private names (the same in torch 2.6 to 2.13): here by one that signs
what it writes, checks a signature before it reads a byte, and lets a *request* name nothing but
the functions below. A *value*, which comes back for a request of ours, may be of any class, since
a stage's module is; only a member of the group can have signed it.

Not through this: TensorPipe's own framing, calls of built-in operators, RRef bookkeeping (see
SECURITY.md). Tensors are described in what is signed; their contents are not signed.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.distributed.rpc import api, internal

from pipedream_rt.errors import TransportError
from pipedream_rt.transport.signing import Signer

F = TypeVar("F", bound=Callable[..., Any])

_REQUEST, _VALUE = 0, 1

_ALLOWED: set[tuple[str, str]] = {
    (__name__, "_tensor_at"),
    (__name__, "_rref_of"),
    (internal.PythonUDF.__module__, internal.PythonUDF.__qualname__),
}

_reading = threading.local()


def allow(function: F) -> F:
    """Decorator of a module-level function that peers may call."""
    _ALLOWED.add((function.__module__, function.__qualname__))
    return function


class _Unpickler(pickle.Unpickler):
    """Finds nothing but what a request may name."""

    def find_class(self, module: str, name: str) -> Any:
        """Look a global up, if it is allowed."""
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


def _shape(tensors: list[Tensor]) -> bytes:
    """What of the tensors is signed."""
    return repr([(t.dtype, tuple(t.shape)) for t in tensors]).encode()


class SignedPickler(internal._InternalRPCPickler):
    """Writes and reads for one generation of a group.

    Args:
        signer: Of this process in it.
    """

    def __init__(self, signer: Signer) -> None:
        """Install nothing; see `install`."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._signer = signer

    def serialize(self, obj: Any) -> tuple[bytes, list[Tensor]]:
        """Pickle and sign."""
        tensors: list[Tensor] = []

        def reduce_tensor(tensor: Tensor) -> Any:
            tensors.append(tensor)
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
        data = len(about).to_bytes(4, "big") + about + stream.getvalue()
        return self._signer.sign(data, kind), tensors

    def deserialize(self, binary_data: bytes, tensor_table: list[Tensor]) -> Any:
        """Check and unpickle.

        Raises:
            TransportError: It is not signed, or names what it may not.
        """
        _, kind, data = self._signer.open(binary_data)
        length = int.from_bytes(data[:4], "big")
        if data[4 : 4 + length] != _shape(tensor_table):
            raise TransportError("the tensors that came are not those that were signed")
        stream = io.BytesIO(data[4 + length :])
        before = getattr(_reading, "tensors", None)
        _reading.tensors = tensor_table
        try:
            unpickler = _Unpickler(stream) if kind == _REQUEST else pickle.Unpickler(stream)
            return unpickler.load()
        except AttributeError as error:  # as torch's own has it: the caller raises it
            return error
        finally:
            _reading.tensors = before


_TORCHS_OWN = internal._internal_rpc_pickler


def install(signer: Signer | None) -> None:
    """Let torch RPC of this process write and read with a signer; None gives back torch's own."""
    pickler = _TORCHS_OWN if signer is None else SignedPickler(signer)
    internal._internal_rpc_pickler = pickler
    api._internal_rpc_pickler = pickler
    api._default_pickler = pickler
