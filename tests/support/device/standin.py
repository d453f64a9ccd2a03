"""A stand-in for an accelerator: the CPU's arithmetic, on devices whose order is checked.

Code of a device is tested here where no device is. Operations run at once, on the CPU, but the
order that streams, events and the host have made is kept, and an access that was not ordered after
one that it conflicts with raises an error with both operations, whatever the timing was. Memory of
a device is closed to the host, and pinned memory is while a copy is in flight. `order.h` says how.

    load()
    x = torch.ones(3, device="standin:1")

The accelerator of a process is the same for all that runs in it, so tests start processes of their
own, with `environment`, in which ``import torch`` loads the stand-in by itself.

Variables of the environment: STANDIN_DEVICES (2), STANDIN_MEMORY_MB (4096, of each device and of
pinned memory), STANDIN_CHECK (1), and STANDIN_SEED (0), from which is drawn what a device leaves
open: how often a query says no before it says yes.

What it cannot tell: how fast anything is, numerics of real kernels, and a missing lock between
threads of the host, which have one clock together. Strides are seen as whole extents, so two
streams that each write some columns of a matrix are reported although they do not meet. There are
no sparse tensors on it, no graphs, and no memory that processes share.
"""

import contextlib
import hashlib
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from filelock import FileLock

HERE = Path(__file__).resolve().parent
SOURCES = sorted(HERE.glob("*.cpp"))
FLAGS = ["-O1", "-Wall", "-Wextra", "-Wno-unused-parameter"]
NAME = "standin"
TORCH = "2.13"
LATEST_S = 600.0
"""Seconds to wait for another process that builds it, which takes a minute."""

WAITS = ("event", "stream", "device", "item", "copy")
DROPPABLE = (*WAITS, "wait_event", "record_event", "record_stream")


# ---------------------------------------------------------------- building and loading
def why_not() -> str | None:
    """Say why there can be no stand-in here, or return None."""
    if sys.platform != "linux":
        return "the stand-in maps its memory as Linux does"
    if not torch.__version__.startswith(TORCH + "."):
        return f"the stand-in is written for torch {TORCH}, and this is {torch.__version__}"
    if torch._C._get_privateuse1_backend_name() not in ("privateuseone", NAME):
        return "another backend of its kind is loaded in this process"
    if library().exists():
        return None
    with _tools_on_path():
        compiler = os.environ.get("CXX", "c++")
        if shutil.which(compiler) is None:
            return f"there is no compiler called {compiler}"
        if shutil.which("ninja") is None:
            return "there is no ninja, with which torch builds extensions"
    if importlib.util.find_spec("setuptools") is None:
        return "there is no setuptools, with which torch builds extensions"
    return None


def library() -> Path:
    """Return where the built library is, or is to be: a folder for each torch and each source."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted([*SOURCES, *HERE.glob("*.h")]):
        digest.update(path.name.encode() + path.read_bytes())
    home = os.environ.get("TORCH_EXTENSIONS_DIR") or Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "torch_extensions"
    )
    return Path(home, f"{NAME}-{torch.__version__}-{digest.hexdigest()[:16]}", f"{NAME}.so")


def load() -> None:
    """Build the stand-in unless it is built, and make it the accelerator of this process."""
    if hasattr(torch, NAME):
        return
    built = library()
    if not built.exists():
        _build(built)
    torch.ops.load_library(str(built))
    torch.ops.standin.start()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def environment() -> dict[str, str]:
    """Return variables for a process in which ``import torch`` loads the stand-in."""
    autoload = str(HERE / "autoload")
    others = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    path = os.pathsep.join([autoload, *(each for each in others if each != autoload)])
    return {**os.environ, "PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}


def _build(built: Path) -> None:
    reason = why_not()
    if reason is not None:
        raise RuntimeError(f"the stand-in cannot be built: {reason}")
    built.parent.mkdir(parents=True, exist_ok=True)
    # The lock is let go of by the system if its owner is killed, unlike the one that torch takes
    # in the folder, which would then be waited for for ever.
    with FileLock(built.parent / "building", timeout=LATEST_S), _tools_on_path():
        if built.exists():
            return
        from torch.utils import cpp_extension

        folder = built.parent / "build"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        jobs = os.environ.get("MAX_JOBS")
        os.environ["MAX_JOBS"] = "1"
        try:
            cpp_extension.load(
                NAME,
                [str(path) for path in SOURCES],
                extra_cflags=FLAGS,
                build_directory=str(folder),
                is_python_module=False,
            )
        finally:
            os.environ.pop("MAX_JOBS")
            if jobs is not None:
                os.environ["MAX_JOBS"] = jobs
        os.replace(folder / built.name, built)  # whoever sees it sees all of it


@contextlib.contextmanager
def _tools_on_path() -> Iterator[None]:
    """Ninja is beside the interpreter of a virtual environment, which may not be activated."""
    before = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = os.pathsep.join([before, sysconfig.get_path("scripts")])
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _device_module() -> object:
    spec = importlib.util.spec_from_file_location(f"torch.{NAME}", HERE / "module.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------- what tests ask and say
def configure(*, check: bool = True, raises: bool = True, seed: int = 0) -> None:
    """Say whether accesses are checked, whether a violation raises, and what is drawn from."""
    torch.ops.standin.configure(check, raises, seed)


def violations() -> list[str]:
    """Return what was found since last asked, whether it has raised or not."""
    return torch.ops.standin.violations()


def waits() -> dict[str, int]:
    """Return how often the host has waited, by kind.

    An ``item`` is a value or a shape that the host has read, and a ``copy`` one between the host
    and a device that was not asked to be non-blocking, or that could not be.
    """
    return dict(zip(WAITS, torch.ops.standin.wait_counts(), strict=False))


def forget_waits() -> None:
    """Count from zero again."""
    torch.ops.standin.forget_counts()


def ignore_next(kind: str, *, after: int = 0) -> None:
    """Let the next wait of a kind in this thread order nothing, as if it had been forgotten.

    Kinds are those of `waits`, and ``wait_event``, ``record_event`` and ``record_stream``. A stream
    that waits for another is a ``record_event`` and a ``wait_event``. With ``after``, so many waits
    of the kind come before the one that is dropped.
    """
    torch.ops.standin.ignore_next(kind, after)


if __name__ == "__main__":
    load()  # python standin.py builds it
