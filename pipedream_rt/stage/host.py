"""Runs one stage on the calling thread, from its job to its end; turns every error into data."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import cloudpickle
import torch

from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import PipelineClosed
from pipedream_rt.stage.inbox import Inbox
from pipedream_rt.stage.job import StageJob
from pipedream_rt.stage.messages import COORDINATOR, Channel, Failed, Key, Reply
from pipedream_rt.stage.stage import Send, Stage
from pipedream_rt.stage.tree import flatten

READY = -1
"""Index of the reply with which a stage says that its job is understood."""


class StageHost:
    """One stage with its inbox.

    Args:
        index: Of the stage.
        inbox: Where its messages arrive.
        send: Hands messages to the transport.
        timeout: For messages that are sure to come.
        threads: For torch's own parallel loops, in this thread.
        computing: Entered around every computation.

    Attributes:
        stage: The stage, once its job has come.
    """

    def __init__(
        self,
        index: int,
        inbox: Inbox,
        send: Send,
        timeout: timedelta,
        threads: int,
        computing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Start no thread; `serve` runs on the caller's."""
        self.index = index
        self.inbox = inbox
        self.stage: Stage | None = None
        self._send = send
        self._timeout = timeout
        self._threads = threads
        self._computing = computing

    def serve(self) -> None:
        """Take the job, run the stage until the inbox is closed. Raises nothing.

        Close the inbox with `PipelineClosed` for a normal end. Every other error goes to the
        coordinator as a `Failed` message, and closes the inbox.
        """
        threading.current_thread().name = f"stage-{self.index}"
        torch.set_num_threads(self._threads)
        try:
            self._run()
        except PipelineClosed:
            pass
        except BaseException as error:  # the top of a thread: errors become messages
            self._report(error)
            self.inbox.close(error)
        finally:
            # A module may hold threads or files of its own, and its tensors are large.
            self.stage = None

    def part(self, part: str) -> Any:
        """Return the ``"module"`` or the torch ``"optimizer"`` of the stage, for references.

        Raises:
            PipelineClosed: The stage has ended.
        """
        if self.stage is None:
            raise PipelineClosed(f"stage {self.index} has ended")
        if part == "module":
            return self.stage.module
        return self.stage.optimizer and self.stage.optimizer.torch_optimizer

    def _run(self) -> None:
        """Build the stage from its job, say so, run it."""
        message = self.inbox.take(Key(Channel.JOB, 0), Deadline(self._timeout))
        job: StageJob = cloudpickle.loads(message.tensors[0].numpy().data)
        del message
        job.settings.apply()
        self.stage = Stage(job, self.inbox, self._send, self._timeout, self._computing)
        self._send(COORDINATOR, READY, Reply(structure=flatten(None)[0]), ())
        self.stage.run()

    def _report(self, error: BaseException) -> None:
        """Send an error to the coordinator, with as much of it as can be pickled."""
        action = "start" if self.stage is None else self.stage.action
        name = type(error).__qualname__
        try:
            text, trace = str(error), "".join(traceback.format_exception(error))
        except Exception as problem:  # the error's own __str__ may raise
            text = trace = f"(its text cannot be had: {type(problem).__name__})"
        try:
            pickled = cloudpickle.dumps(error)
            cloudpickle.loads(pickled)
        except Exception:  # so may its pickling; the text is left
            pickled = b""
        failed = Failed(action=action, type_name=name, text=text, trace=trace, pickled=pickled)
        self._send(COORDINATOR, 0, failed, ())
