"""Whether this process is a worker, which opens no pipelines of its own."""

from __future__ import annotations

import sys
from types import FrameType

from pipedream_rt.errors import ConfigError

_names: list[str] = []
"""The name of the worker that this process is; empty in any other process."""


def become_worker(name: str) -> None:
    """Note that this process is a worker, until its end."""
    _names[:] = [name]


def is_worker() -> bool:
    """Whether this process is a worker."""
    return bool(_names)


def refuse_in_worker() -> None:
    """Refuse to begin a pipeline in a worker, whose own workers would begin the next, and so on."""
    if not is_worker():
        return
    module = _imported_now()
    if module:
        raise ConfigError(
            f"worker {_names[0]!r} imports the module {module!r}, because it needs a class or "
            f"function of it, and {module!r} opens a pipeline when it is imported. Put what trains "
            'below `if __name__ == "__main__":` and start that file as the script, or into a '
            "function that the script calls"
        )
    raise ConfigError(
        f"this process is worker {_names[0]!r}, in which a layer, the loss or another function "
        "that its stages compute opens a pipeline; only the script can, outside of what it gives "
        "to Pipeline"
    )


def _imported_now() -> str:
    """The name of the user's module that this thread imports; empty for none."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if frame.f_code.co_name == "<module>" and name.split(".")[0] not in _OURS:
            return name
        frame = frame.f_back
    return ""


_OURS = ("__main__", "pipedream_rt")
