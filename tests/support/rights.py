"""The rights of this process, and how to start another one without any."""

import shutil
from pathlib import Path

CAP_NET_ADMIN, CAP_SYS_ADMIN = 12, 21


def has(*capabilities):
    """Whether this process has all of some capabilities of the kernel."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return all(int(line.split()[1], 16) >> each & 1 for each in capabilities)
    return False


def why_lacking():
    """Why tests that are marked as `rights` cannot run here; empty if they can."""
    if has(CAP_NET_ADMIN, CAP_SYS_ADMIN):
        return ""
    return "it needs CAP_NET_ADMIN and CAP_SYS_ADMIN, which root has and an ordinary user has not"


def without():
    """The words before a command that start it without a capability; none where it has none.

    Raises:
        FileNotFoundError: This process has some, and ``setpriv`` (package util-linux) is missing.
    """
    if not has(CAP_NET_ADMIN):
        return []
    if shutil.which("setpriv") is None:
        raise FileNotFoundError("setpriv, of the package util-linux")
    return ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
