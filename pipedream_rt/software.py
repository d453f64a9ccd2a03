"""What the bits of a run depend on, of a machine: versions of software, processor, commit."""

from __future__ import annotations

import importlib.util
import platform
import runpy
import subprocess
import sys
from pathlib import Path

from pipedream_rt import __version__
from pipedream_rt.schema import printable


def software() -> str:
    """Return in one line the versions of torch, Python and this package."""
    # Without importing torch: a worker that waits for its job has not done so yet.
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"torch {_version_of_torch()}, Python {python}, pipedream-rt {__version__}"


def _version_of_torch() -> str:
    """Return ``torch.__version__``; "is missing" where there is no torch."""
    if "torch" in sys.modules:
        return str(sys.modules["torch"].__version__)
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "is missing"
    try:
        found = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    except OSError:  # torch is in an archive, for example
        return "of no known version"
    return str(found.get("__version__"))


def processor() -> str:
    """Return the model of the processor, and which of its vector instructions torch uses."""
    import torch  # not at the top: a worker asks for `software` before it imports torch

    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else name
    return printable(f"{name} ({torch.backends.cpu.get_cpu_capability()})", 200)


_GIT_S = 5.0
"""Seconds for git to name the commit. A run begins only afterwards."""


def commit(folder: Path) -> str:
    """Return the git commit of a folder, with a plus if files differ from it; "" for none."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=12"]
    try:
        done = subprocess.run(
            [*command, "--exclude=*"], capture_output=True, text=True, timeout=_GIT_S, check=True
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
    return printable(done.stdout.strip(), 60)
