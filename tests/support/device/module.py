"""What `torch.standin` offers: what users of `torch.cuda` expect of the module of a device."""

import torch
from torch import Event, Stream, accelerator

__all__ = [
    "Event",
    "Stream",
    "current_device",
    "current_stream",
    "device",
    "device_count",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_device_name",
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "is_available",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "reset_peak_memory_stats",
    "set_device",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "synchronize",
]

Device = torch.device | str | int | None

_standin = torch.ops.standin

current_device = accelerator.current_device_index
current_stream = accelerator.current_stream
empty_cache = accelerator.empty_cache
max_memory_allocated = accelerator.max_memory_allocated
mem_get_info = accelerator.get_memory_info
memory_allocated = accelerator.memory_allocated
memory_reserved = accelerator.memory_reserved
memory_stats = accelerator.memory_stats
reset_peak_memory_stats = accelerator.reset_peak_memory_stats
set_device = accelerator.set_device_index
set_stream = accelerator.set_stream
synchronize = accelerator.synchronize


def _index(device: Device) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


class device(accelerator.device_index):  # noqa: N801 - its name in torch.cuda
    """Make a device the current one in a block."""

    def __init__(self, device: Device) -> None:
        super().__init__(None if device is None else _index(device))


def device_count() -> int:
    """Return how many devices there are, without using any."""
    return _standin.device_count()


def is_available() -> bool:
    """Say whether there is any device."""
    return device_count() > 0


def is_initialized() -> bool:
    """Say whether this process has used a device, after which it must not fork."""
    return _standin.is_initialized()


def get_device_name(device: Device = None) -> str:
    """Return a name to be shown."""
    return f"stand-in {_index(device)}"


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return what `torch.autocast` may cast to."""
    return [torch.float16, torch.bfloat16]


def __getattr__(name: str) -> bool:
    """Answer as a variable would that torch reads, among others where it keeps states of generators
    for what is computed again."""
    if name == "_initialized":
        return is_initialized()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _lazy_init() -> None:
    _standin.initialize()


def _is_in_bad_fork() -> bool:
    return _standin.is_in_bad_fork()


# ---------------------------------------------------------------- random numbers
def get_rng_state(device: Device = None) -> torch.Tensor:
    """Return the state of the generator of a device, on the CPU."""
    return _standin.rng_state(_index(device))


def set_rng_state(new_state: torch.Tensor, device: Device = None) -> None:
    """Set the state of the generator of a device."""
    _standin.set_rng_state(_index(device), new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the states of the generators of all devices."""
    return [get_rng_state(each) for each in range(device_count())]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    """Set the states of the generators of all devices."""
    for each, state in enumerate(new_states):
        set_rng_state(state, each)


def manual_seed(seed: int) -> None:
    """Seed the generator of the current device."""
    _standin.seed(current_device(), _signed(seed))


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices."""
    for each in range(device_count()):
        _standin.seed(each, _signed(seed))


def initial_seed() -> int:
    """Return the seed of the generator of the current device."""
    return _standin.initial_seed(current_device())


def _signed(seed: int) -> int:
    """Return a seed of 64 bits as the signed number that has the same bits."""
    return (int(seed) + (1 << 63)) % (1 << 64) - (1 << 63)
