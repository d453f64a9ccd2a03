"""The random generators of torch in this process: of the host, and of accelerators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from pipedream_rt.devices.choice import module_in_use
from pipedream_rt.models.preserving_state import drawing_alone
from pipedream_rt.models.tensors import accelerator_here


def states_there() -> list[Tensor]:
    """Return the states of the generators of all accelerators, if this process has used one."""
    # A kind that cannot say whether it is in use has no states by number either.
    module = module_in_use(unknown=False)
    if module is None:
        return []
    return [module.get_rng_state(number) for number in range(torch.accelerator.device_count())]


def set_states_there(states: Sequence[Tensor]) -> None:
    """Set the generators of accelerators to states that `states_there` returned, if they fit."""
    # A checkpoint of another machine may have another number of accelerators, or another kind.
    kind = accelerator_here()
    if not states or kind is None or len(states) != torch.accelerator.device_count():
        return
    module = torch.get_device_module(kind)
    if any(state.shape != module.get_rng_state(i).shape for i, state in enumerate(states)):
        return
    for number, state in enumerate(states):
        module.set_rng_state(state, number)


def random_state() -> list[Tensor]:
    """Return the states of all generators, that of the host first."""
    return [torch.get_rng_state(), *states_there()]


def set_random_state(state: Sequence[Tensor]) -> None:
    """Set all generators to what `random_state` returned."""
    host, *there = state
    torch.set_rng_state(host)
    set_states_there(there)


def has_drawn(since: Sequence[Tensor]) -> bool:
    """Whether a generator has moved on since `random_state` returned its state."""
    # Not strict: an accelerator that was not in use then has a state only now.
    return any(not torch.equal(a, b) for a, b in zip(since, random_state(), strict=False))


@contextmanager
def kept_generator_state() -> Iterator[None]:
    """Restore the states of torch's generators after a body that seeds or draws."""
    with drawing_alone():  # else these may be the states in which another thread has seeded them
        state = random_state()
    try:
        yield
    finally:
        with drawing_alone():
            set_random_state(state)
