"""Every error that pipedream-rt raises on purpose.

The tree::

    PipelineError
    ├── ConfigError (also ValueError)   wrong arguments; raised before anything starts
    ├── ScheduleError                   an order breaks a rule; the message shows the grid
    ├── VersionError                    a weight version that is not kept was asked for
    ├── TransportError                  a message could not be moved
    │   ├── RendezvousTimeout           the workers did not all join in time
    │   ├── MessageTimeout              an awaited message did not come in time
    │   └── PeerLost                    the other end of a link is gone
    ├── TraceError (also ValueError)    a trace file cannot be written or read, or not be used
    ├── CheckpointError                 a checkpoint cannot be written, or is not whole
    ├── WorkerLost                      a worker process died or was cut off
    ├── StageFailed                     an action raised on a stage; __cause__ is its error
    │   └── NonFiniteLoss               the loss became NaN or infinite
    ├── PoisonedMicroBatch              the same micro-batch ended its worker again and again
    └── PipelineClosed                  used after close, or after a failure

A message says where (stage, action, worker), what was expected, what was found and what to do.
All of them survive pickling, because they cross processes.
"""

from __future__ import annotations

from typing import Any


def _rebuild(cls: type[PipelineError], args: tuple[Any, ...], state: dict[str, Any]) -> Exception:
    """Make an error again without calling its constructor, whose signature may differ."""
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class PipelineError(Exception):
    """Base of every error of this package."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by class, text and attributes."""
        return (_rebuild, (type(self), self.args, self.__dict__.copy()))


class ConfigError(PipelineError, ValueError):
    """Wrong arguments. Raised before anything is started or lost."""


class ScheduleError(PipelineError):
    """An order of actions breaks a rule."""


class VersionError(PipelineError):
    """A weight version was asked for that is not kept, or would have been overwritten."""


class TransportError(PipelineError):
    """A message could not be moved."""


class RendezvousTimeout(TransportError):
    """Not every worker joined before the deadline. ``missing`` says how many or which."""

    def __init__(self, message: str, *, missing: int = 0) -> None:
        """Args: message: What happened. missing: Number of workers that never joined."""
        super().__init__(message)
        self.missing = missing


class MessageTimeout(TransportError):
    """An awaited message did not come before its deadline."""


class PeerLost(TransportError):
    """The other end of a link is gone. ``peer`` is its name."""

    def __init__(self, message: str, *, peer: str) -> None:
        """Args: message: What happened. peer: Name of the endpoint that is gone."""
        super().__init__(message)
        self.peer = peer


class TraceError(PipelineError, ValueError):
    """A trace cannot be written, is cut or foreign, or does not hold what is asked of it."""


class CheckpointError(PipelineError):
    """A checkpoint cannot be written, is not whole, or is of another model."""


class WorkerLost(PipelineError):
    """A worker process died or was cut off.

    Attributes:
        worker: Its name.
        stage: What it hosted, the first of several.
        doing: Text form of the action at hand, as ``"2:F3"``; empty where it is not known.
    """

    def __init__(self, message: str, *, worker: str, stage: int | None, doing: str = "") -> None:
        """Args: message: What happened. worker, stage, doing: Where."""
        super().__init__(message)
        self.worker = worker
        self.stage = stage
        self.doing = doing


class StageFailed(PipelineError):
    """An action raised on a stage.

    Attributes:
        stage: Index of the stage, 0-based.
        action: Text form of the action, as ``"F3"``, or the name of a command.
        trace: The traceback of the worker, as text.

    ``__cause__`` is the error itself, with its own type, where it could be pickled.
    """

    def __init__(self, message: str, *, stage: int, action: str, trace: str = "") -> None:
        """Args: message: What happened. stage, action: Where. trace: Remote traceback."""
        super().__init__(message)
        self.stage = stage
        self.action = action
        self.trace = trace


class NonFiniteLoss(StageFailed):
    """The loss of a micro-batch is NaN or infinite (``on_nan="raise"``)."""


class PoisonedMicroBatch(PipelineError):
    """The same micro-batch ended its worker again and again.

    Attributes:
        micro_batch: Its number among those trained on, 0-based.
        stage: Where.

    ``__cause__`` is the last failure.
    """

    def __init__(self, message: str, *, micro_batch: int, stage: int) -> None:
        """Args: message: What happened. micro_batch, stage: Where."""
        super().__init__(message)
        self.micro_batch = micro_batch
        self.stage = stage


class RemoteError(PipelineError):
    """Stands in as the cause of a StageFailed for an error that could not be pickled."""


class PipelineClosed(PipelineError):
    """The pipeline was used after it was closed or had failed."""
