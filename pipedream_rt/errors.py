"""Every error that pipedream-rt raises on purpose.

The tree::

    PipelineError
    ├── ConfigError (also ValueError)   an argument is wrong; raised before anything starts
    │   └── UnknownOption (also TypeError)   there is no option of that name
    ├── ScheduleError                   an order breaks a rule; the message shows the grid
    ├── VersionError                    an action reads a weight version that is not kept
    ├── TransportError                  a message cannot be delivered
    │   ├── RendezvousTimeout           not all workers joined in time
    │   ├── MessageTimeout              an awaited message did not come in time
    │   └── PeerLost                    the process at the other end is gone
    ├── TraceError (also ValueError)    a trace cannot be written, read or used
    ├── CheckpointError                 a checkpoint cannot be written, read or used
    ├── WorkerLost                      a worker process died or was cut off
    ├── StageFailed                     an action raised on a stage; __cause__ is its error
    │   └── NonFiniteLoss               the loss became NaN or infinite
    ├── PoisonedMicroBatch              the same micro-batch failed again and again
    └── PipelineClosed                  the pipeline was used after its end

A message says where the error happened (stage, action, worker), what was expected, what was found
and what to do. Every error can be pickled, because errors cross processes.
"""

from __future__ import annotations

from typing import Any


def _rebuild(cls: type[PipelineError], args: tuple[Any, ...], state: dict[str, Any]) -> Exception:
    """Rebuild an unpickled error without its constructor, whose signature may differ."""
    error = cls.__new__(cls, *args)
    error.args = args
    error.__setstate__(state)
    return error


class PipelineError(Exception):
    """The base of every error of this package."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Let pickle keep the class, the text and the attributes."""
        # And an `OSError` as the cause: a retry looks at it, since such a condition may pass.
        of_system = isinstance(self.__cause__, OSError)
        state = self.__dict__ | ({"__cause__": self.__cause__} if of_system else {})
        return (_rebuild, (type(self), self.args, state))


class ConfigError(PipelineError, ValueError):
    """An argument is wrong. It is raised before anything starts or changes."""


class UnknownOption(ConfigError, TypeError):
    """There is no option of that name. A `TypeError` too, as Python itself raises it."""


class ScheduleError(PipelineError):
    """An order of actions breaks a rule."""


class VersionError(PipelineError):
    """An action reads a weight version that is not kept, or would overwrite one that is read."""


class TransportError(PipelineError):
    """A message cannot be delivered."""


class RendezvousTimeout(TransportError):
    """Not every worker joined before the deadline.

    Args:
        message: The text of the error.
        missing: Number of workers that did not join.

    Attributes:
        missing: Number of workers that did not join.
    """

    def __init__(self, message: str, *, missing: int = 0) -> None:
        super().__init__(message)
        self.missing = missing


class MessageTimeout(TransportError):
    """An awaited message did not come before its deadline."""


class PeerLost(TransportError):
    """The process at the other end of a connection is gone.

    Args:
        message: The text of the error.
        peer: Name of the process that is gone.

    Attributes:
        peer: Name of the process that is gone.
    """

    def __init__(self, message: str, *, peer: str) -> None:
        super().__init__(message)
        self.peer = peer


class TraceError(PipelineError, ValueError):
    """A trace cannot be written or read, or does not hold what is needed."""


class CheckpointError(PipelineError):
    """A checkpoint cannot be written, is not whole, or was made with another model."""


class WorkerLost(PipelineError):
    """A worker process died or was cut off.

    Args:
        message: The text of the error.
        worker: Name of the worker.
        stage: Index of the stage that it hosted, the first of several; None if not known.
        doing: Text form of its last action, as ``"2:F3"``; empty if not known.
        crashed: Whether it ended by what it computed: by a signal such as SIGSEGV, or by an exit.

    Attributes:
        worker: Name of the worker.
        stage: Index of the stage that it hosted, the first of several; None if not known.
        doing: Text form of its last action, as ``"2:F3"``; empty if not known.
        crashed: Whether it ended by what it computed: by a signal such as SIGSEGV, or by an exit.
    """

    def __init__(
        self,
        message: str,
        *,
        worker: str,
        stage: int | None,
        doing: str = "",
        crashed: bool = False,
    ) -> None:
        super().__init__(message)
        self.worker = worker
        self.stage = stage
        self.doing = doing
        self.crashed = crashed


class StageFailed(PipelineError):
    """An action raised on a stage.

    ``__cause__`` is the error itself, with its own type, if it can be pickled.

    Args:
        message: The text of the error.
        stage: Index of the stage, 0-based.
        action: Text form of the action, as ``"F3"``, or the name of a command.
        trace: The traceback on the worker, as text.

    Attributes:
        stage: Index of the stage, 0-based.
        action: Text form of the action, as ``"F3"``, or the name of a command.
        trace: The traceback on the worker, as text.
    """

    def __init__(self, message: str, *, stage: int, action: str, trace: str = "") -> None:
        super().__init__(message)
        self.stage = stage
        self.action = action
        self.trace = trace


class NonFiniteLoss(StageFailed):
    """The loss of a micro-batch is NaN or infinite (``Training(on_nan="raise")``)."""


class PoisonedMicroBatch(PipelineError):
    """The same micro-batch failed again and again; ``__cause__`` is the last failure.

    Args:
        message: The text of the error.
        micro_batch: Number of the micro-batch among those trained on, 0-based.
        stage: Index of the stage, 0-based.

    Attributes:
        micro_batch: Number of the micro-batch among those trained on, 0-based.
        stage: Index of the stage, 0-based.
    """

    def __init__(self, message: str, *, micro_batch: int, stage: int) -> None:
        super().__init__(message)
        self.micro_batch = micro_batch
        self.stage = stage


class RemoteError(PipelineError):
    """The cause of a `StageFailed` if the error itself cannot be pickled."""


class PipelineClosed(PipelineError):
    """The pipeline was used after it was closed or had failed."""
