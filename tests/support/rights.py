"""The rights of this process, and how to start another one without any."""

import os
import shutil
from pathlib import Path

CAP_SETGID, CAP_SETUID, CAP_NET_ADMIN, CAP_SYS_ADMIN = 6, 7, 12, 21
NOBODY = 65534


def has(*capabilities):
    """Whether this process has all of some capabilities of the kernel."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return all(int(line.split()[1], 16) >> each & 1 for each in capabilities)
    return False


def why_lacking():
    """Why tests that are marked as `rights` cannot run here; empty if they can."""
    if has(CAP_SETGID, CAP_SETUID, CAP_NET_ADMIN, CAP_SYS_ADMIN):
        return ""
    return (
        "it needs CAP_NET_ADMIN, CAP_SYS_ADMIN, CAP_SETUID and CAP_SETGID, which root has and an "
        "ordinary user has not"
    )


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


def forked_as_another_user(do):
    """The number of a child of another user, which ends with the code that a function gives.

    The code is 255 if the function raises.
    """
    child = os.fork()
    if not child:
        code = 255
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            code = do()
        finally:
            os._exit(code)
    return child


def exit_code(child):
    """The code with which a child of this process ends, when it has ended."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
