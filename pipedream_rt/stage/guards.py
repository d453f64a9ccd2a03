"""What a forward does that plain PyTorch would let reach farther than a stage."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from pipedream_rt.messages.tree import Value, places

_log = logging.getLogger(__name__)


@contextmanager
def telling_changed_inputs(given: Value | None) -> Iterator[None]:
    """Say if a forward, the body, changes in place what the loader has yielded.

    Args:
        given: What came of the mini-batch; None to say nothing.
    """
    if given is None:
        yield
        return
    before = [tensor._version for tensor in given.tensors]
    yield
    names = places(given.structure)
    for number, (tensor, version) in enumerate(zip(given.tensors, before, strict=True)):
        if tensor._version != version:
            _log.warning(
                "the forward changes the tensor%s of the mini-batch in place. Here it is a copy, "
                "so the loader's own tensor stays as it is, also when the loader yields it again; "
                "in plain PyTorch it would be changed",
                f" {names[number]!r}" if names[number] else "",
            )
