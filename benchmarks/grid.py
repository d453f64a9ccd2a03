"""The engine of grids of runs: each is done in a process, kept as a line of JSON, and not again.

A run is a value with a key, whose work is a function (`fill`), or a command that prints JSON
objects, of which the last one counts (`said`). Lines are only ever added to a file, one by one, so
a grid that was stopped goes on where it was, and files of long ago are read as those of today.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

Line = dict[str, Any]
"""What is known of one run, as JSON has it."""

Results = dict[str, Line]
"""Lines by the keys of their runs."""


def lines_of(path: Path) -> list[Line]:
    """The lines of a file; none if it is not there."""
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def keep(path: Path, line: Line) -> None:
    """Add a line to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def by_key(*paths: Path) -> Results:
    """The lines of files by their keys; of several with one key the last counts."""
    return {line["key"]: line for path in paths for line in lines_of(path)}


def key_of(run: Any, later: Sequence[str] = (), more: str = "") -> str:
    """A short digest of a run.

    Args:
        run: A dataclass.
        later: Fields that came later: a run in which they are empty keeps the key that it had.
        more: What else tells the run from others.
    """
    fields = {name: value for name, value in asdict(run).items() if name not in later or value}
    text = json.dumps(fields, sort_keys=True) + more
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def combinations(**options: Any) -> Iterator[dict[str, Any]]:
    """Every choice of one value of each option that is a list; the first of these changes last."""
    lists = [value if isinstance(value, list) else [value] for value in options.values()]
    return (dict(zip(options, values, strict=True)) for values in itertools.product(*lists))


def fill(
    kept: Results,
    wanted: Callable[[Results], Sequence[Any]],
    done: Callable[[Any], Line],
    path_of: Callable[[Line], Path],
    jobs: int,
) -> Iterator[Line]:
    """Do what is wanted and not kept, until nothing is.

    Args:
        kept: The results until now; new ones are added.
        wanted: Says what can be done by what is kept, again after all of that is done.
        done: Does a run in another process, which imports it by its name; returns its line.
        path_of: Says where a line is kept.
        jobs: How many runs there are at a time.

    Yields:
        Each line, once it is kept.
    """
    while todo := {run.key: run for run in wanted(kept) if run.key not in kept}:
        # The processes end with this one, however it ends by itself.
        with multiprocessing.get_context("spawn").Pool(min(jobs, len(todo))) as pool:
            for line in pool.imap_unordered(done, todo.values()):
                del todo[line["key"]]
                keep(path_of(line), line)
                kept[line["key"]] = line
                yield line


class Ended(NamedTuple):
    """How a command ended.

    Attributes:
        found: The last JSON object that it printed; empty if there is none.
        code: Its exit code; None if it was killed, as its time was over.
        errors: What it has written to standard error.
    """

    found: Line
    code: int | None
    errors: str


def said(
    command: Sequence[str | Path],
    limit_s: float | None = None,
    environment: Mapping[str, str] | None = None,
    folder: Path = ROOT,
    apart: bool = False,
) -> Ended:
    """Run a command until it ends or its time is over.

    Args:
        command: The program and its arguments.
        limit_s: Seconds after which it is killed; None for any number.
        environment: Variables besides those of this process.
        folder: Where it runs.
        apart: Whether it has a session of its own, all processes of which are killed at its end.
            Otherwise it stays in that of this process, and is ended together with it.
    """
    # Files, since what the command has started may outlive it and hold pipes open.
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=output, stderr=errors, cwd=folder,
            env={**os.environ, **(environment or {})}, start_new_session=apart,
        )  # fmt: skip
        code = None
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):  # all of it have ended
                os.killpg(process.pid, signal.SIGKILL) if apart else process.kill()
            process.wait()
        output.seek(0)
        errors.seek(0)
        return Ended(_last(output.read()), code, errors.read())


def _last(text: str) -> Line:
    """The last JSON object of a text, which has other words and lines that were cut off, too."""
    for line in reversed(text.splitlines()):
        with suppress(ValueError):
            if isinstance(found := json.loads(line), dict):
                return found
    return {}


def end_by_signals() -> None:
    """Let signals end this process as an error does, so that what it has started ends too."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))


def pyplot_of_svg() -> Any:
    """Return `matplotlib.pyplot`, as it draws SVG files whose bytes do not change by themselves."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "pipedream-rt"
    from matplotlib import pyplot

    return pyplot
