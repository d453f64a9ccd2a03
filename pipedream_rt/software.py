"""What of a machine the bits of a run depend on: the versions of its software, its processor."""

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
    """Return the versions of what computes and of what unpickles in this process, in one line.

    torch is not imported for it: a worker that waits for its job has not done so yet.
    """
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
    except OSError:  # it is in an archive, say
        return "of no known version"
    return str(found.get("__version__"))


def processor() -> str:
    """Return the kind of processor of this machine, and which of its instructions torch uses."""
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
"""For git to say which commit it is; a run does not begin before."""


def commit(folder: Path) -> str:
    """Return the commit of git in a folder, with a plus where files differ from it; "" for none."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=12"]
    try:
        done = subprocess.run(
            [*command, "--exclude=*"], capture_output=True, text=True, timeout=_GIT_S, check=True
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
    return printable(done.stdout.strip(), 60)
