"""How a worker or the command of a node ends, and who starts it again after which end.

=================  ====  =============================================================
end                code
=================  ====  =============================================================
`DONE`             0     the job is over, and went well
`FAILED`           1     it was refused, or an error; starting it again would not help
`WRONG_COMMAND`    2     click's own code for a command line that makes no sense
`COORDINATOR_LOST` 3     the coordinator died or did not come, or the job goes on with
                         other workers
`AGAIN`            75    the job ended before it began
`OVER`             76    the script has ended well for good
`UNREACHED`        77    no coordinator was found in time
`UNKNOWN`          1000  the process that could tell is gone too
a signal           -n    128 + n, as a shell has it
=================  ====  =============================================================

Codes from 75 on are between a process and the one that forked it, and never leave the two: the
command exits with `outward` of them.

It imports no torch: the command line uses this module too.
"""

from __future__ import annotations

import signal
from enum import Enum, IntEnum


class WorkerEnd(IntEnum):
    """How a worker process or a node's command has ended, by its exit code."""

    DONE = 0
    FAILED = 1
    WRONG_COMMAND = 2
    COORDINATOR_LOST = 3
    AGAIN = 75
    OVER = 76
    UNREACHED = 77
    UNKNOWN = 1000


class Starter(Enum):
    """Who starts a worker, or the command of a node, again."""

    SCRIPT = "the script, whose recovery starts all workers of its machine anew"
    PERSIST = "the worker itself, with --persist"
    FORKED = "a worker that `pipedream-rt run` has started, for which it forks a child for each job"
    NODE = "`pipedream-rt run` on a node that is not the first, for its workers"
    ENGINE = "an engine that starts `pipedream-rt run` again: torchrun's agent, Slurm, Ray"
    SYSTEMD = "systemd, by the unit in `workers/`"
    KUBERNETES = "the kubelet, by the manifests in `workers/`"


_NEXT_COORDINATOR = frozenset({WorkerEnd.DONE, WorkerEnd.AGAIN, WorkerEnd.COORDINATOR_LOST})
_ANSWERS = frozenset(WorkerEnd) - {WorkerEnd.UNKNOWN}
_CRASHES = {f"killed by SIG{name}" for name in ("SEGV", "ABRT", "FPE", "BUS", "ILL")}
_OURS = {f"exit code {code}" for code in (WorkerEnd.COORDINATOR_LOST.value, WorkerEnd.AGAIN.value)}


def is_started_again(starter: Starter, code: int) -> bool:
    """Whether a starter starts again what has ended with a code, as a shell has it.

    This is the table of all restarts. What a starter does beyond it, as a limit of attempts, is
    its own.
    """
    match starter:
        case Starter.SCRIPT:
            return True  # as often as `Recovery(max_restarts=...)` allows
        case Starter.PERSIST | Starter.FORKED:
            return code in _NEXT_COORDINATOR
        case Starter.NODE:
            # COORDINATOR_LOST of a worker here means that nobody has called it within its patience,
            # and all workers of a node hear the same: so the node ends with it. Any other code is
            # that of a signal, or of what a stage computes, from which the script recovers.
            return code not in _ANSWERS
        case Starter.ENGINE:
            return not is_final(code)
        case Starter.SYSTEMD:
            return code not in (WorkerEnd.DONE, WorkerEnd.FAILED, WorkerEnd.WRONG_COMMAND)
        case Starter.KUBERNETES:
            return code != WorkerEnd.DONE


def is_final(code: int) -> bool:
    """Whether an exit code says that starting the same again is not needed, or would not help."""
    # Not final are signals, as 143 after a checkpoint at SIGTERM, and a lost coordinator.
    return code < 128 and code != WorkerEnd.COORDINATOR_LOST


def outward(code: int) -> int:
    """Return the exit code of a worker's command, of how its last life has ended."""
    return WorkerEnd.COORDINATOR_LOST.value if code == WorkerEnd.AGAIN else code


def shell_code(code: int) -> int:
    """Return an exit code as a shell has it: 128 + the signal that ended the process."""
    return 128 - code if code < 0 else code


def in_words(code: int) -> str:
    """Say how a process has ended, by its code as `subprocess.Popen` has it."""
    if code == WorkerEnd.UNKNOWN:
        return "the process that forked it and could tell how it ended is gone too"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {int(code)}"


def is_of_its_own(ending: str) -> bool:
    """Whether a worker has ended by what it computes: not by SIGKILL, nor for want of a peer.

    ``ending`` is as `in_words` says it.
    """
    return ending in _CRASHES or (ending.startswith("exit code") and ending not in _OURS)
