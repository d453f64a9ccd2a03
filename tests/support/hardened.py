"""A process in a place as hard as that of a container: read-only, without rights, home and IPv6."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from . import rights
from .deadlines import LATEST_S

OTHER_USER = 64512
"""The number of a user whom nobody has."""

_SETUP = """
set -e
mount --make-rprivate /
[ ! -d /proc/sys/net/ipv6 ] || echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6
ip link set lo up
mount -t tmpfs -o size={shm} tmpfs /dev/shm
chmod 1777 /dev/shm
mount --bind {folder} {folder}
mount -o remount,bind,ro /
cd {folder}
exec "$@"
"""


def why_not():
    """Why there can be no such place here; empty if there can."""
    if missing := [
        name for name in ("unshare", "mount", "ip", "setpriv") if not shutil.which(name)
    ]:
        return f"the commands {', '.join(missing)} are missing"
    made = subprocess.run(
        ["unshare", "-m", "-n", "true"], capture_output=True, text=True, timeout=LATEST_S
    )
    return made.stderr.strip()


def others_can_run_python():
    """Whether another user can start this interpreter, which he cannot where it is root's alone."""
    places = [Path(sys.executable).absolute(), Path(sys.executable).resolve(), Path(os.__file__)]
    return all(each.stat().st_mode & 0o001 for place in places for each in place.parents)


def run(*words, folder, shm="64k", as_other_user=False, **variables):
    """Run Python there, and return how it has ended, with what it has written.

    Args:
        words: The arguments of Python.
        folder: All that can be written to.
        shm: The size of ``/dev/shm``.
        as_other_user: Whether to be another user than this one.
        variables: The environment, beside the path and what torch and OpenBLAS go by.
    """
    kept = ("PATH", "LANG", "OMP_NUM_THREADS", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    user = [f"--reuid={OTHER_USER}", f"--regid={OTHER_USER}", "--clear-groups"]
    setup = _SETUP.format(shm=shm, folder=shlex.quote(str(folder)))
    return subprocess.run(
        [
            *("unshare", "-m", "-n", "sh", "-c", setup, "sh"),
            *rights.without(), *(user if as_other_user else ()), "env", "-i",
            *(f"{name}={value}" for name, value in {**environment, **variables}.items()),
            *(sys.executable, *map(str, words)),
        ],
        capture_output=True, text=True, timeout=LATEST_S,
    )  # fmt: skip
