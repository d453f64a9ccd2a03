"""The commands that show a run: ``report`` writes a page, ``watch`` follows a run that goes on."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from pipedream_rt.cli.shared_options import GivenPath
from pipedream_rt.coordinator.recovery.status_server import running
from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import ConfigError, PipelineError
from pipedream_rt.observers.folder import EVENTS, Following, read_run
from pipedream_rt.observers.live import EVERY_S, LivePage
from pipedream_rt.observers.page.render import comparison_of, write_page, write_report
from pipedream_rt.observers.run_record import RunRecord
from pipedream_rt.paths import given_path
from pipedream_rt.schema import printable
from pipedream_rt.tracing.events import Begun, Ended, Event, unpacked

_ADDRESS = re.compile(r"[^/\s]+:\d{1,5}")
_ADDRESS_LIKE = re.compile(r":\d|://")
_PATIENCE = timedelta(seconds=60)
"""For a page to answer, and between two events that it sends."""

_MOST_RUNS = 8
"""Runs that one page shows side by side: as many as there are line styles."""

_LONGEST = 1 << 24
"""Bytes that an event may have."""


@click.command(short_help="Write a page about a recorded run, or several side by side.")
@click.argument("runs", nargs=-1, required=True, type=GivenPath(), metavar="RUN...")
@click.option("-o", "--output", default="report.html", show_default=True,
              type=GivenPath(dir_okay=False), help="The file to write.")  # fmt: skip
def report(runs: tuple[str, ...], output: str) -> None:
    """Write a page about the run that was recorded in the folder RUN; of several, side by side.

    A pipeline records its run with Observe(record=FOLDER), or under pipedream-rt run --record. The
    page is one HTML file, which needs no network.
    """
    if len(runs) > _MOST_RUNS:
        raise click.UsageError(f"{len(runs)} runs are too many for one page; give {_MOST_RUNS}")
    if len(runs) == 1:
        path = write_report(output, read_run(runs[0]))
    else:
        path = write_page(output, comparison_of({run: read_run(run) for run in runs}))
    what = f"{len(runs)} runs side by side, " if len(runs) > 1 else ""
    click.echo(f"{path}: {what}{path.stat().st_size / 1024:.0f} KiB, open it in a browser")


@click.command(short_help="Follow a run that goes on, here or in a browser.")
@click.argument("run")
@click.option("--web", is_flag=True, help="Serve a page for a browser, until Ctrl-C.")
@click.option("--host", default="127.0.0.1", show_default=True,
              help="With --web: the address to listen at.")  # fmt: skip
@click.option("--port", default=0, show_default=True, type=click.IntRange(0, 65535),
              help="With --web: the port; 0 for a free one.")  # fmt: skip
@click.option("--token", envvar="PIPEDREAM_RT_WATCH_TOKEN",
              help="What the address of the page must have; made anew if not given.")  # fmt: skip
def watch(run: str, web: bool, host: str, port: int, token: str | None) -> None:
    """Follow a run: RUN is the folder in which it is recorded, or the address of its page.

    It reads what the run writes, and changes nothing in it. With --web it serves a page; on another
    machine, RUN is then HOST:PORT with --token, or the whole address.
    """
    if Path(run).is_dir() or not _ADDRESS_LIKE.search(run):
        following = _wait_for(given_path(run, "RUN"))
        if web:
            _serve(following, host, port, token)
        else:
            with closing(following):
                _show(_events_of(following))
        return
    address = _address(run, token)
    if web:
        raise click.UsageError("the page is served already: open its address in a browser")
    _show(_events_at(address))


def _wait_for(folder: Path) -> Following:
    """Return the reader of a folder, as soon as a run is recorded there."""
    if folder.is_file() or (folder / EVENTS).exists():
        return Following(folder)
    found = ""
    if folder.is_dir():
        saved = any(folder.glob("step-*"))
        found = f" (it has {'checkpoints' if saved else 'other files'}, and no {EVENTS} yet)"
    elif not folder.exists():
        found = " (there is no such folder yet)"
    click.echo(f"waiting for a run that is recorded in {folder}{found}; Ctrl-C ends this", err=True)
    wait = threading.Event()
    try:
        while not (folder / EVENTS).exists():
            wait.wait(EVERY_S)
    except KeyboardInterrupt:
        raise click.exceptions.Exit(130) from None
    return Following(folder)


def _serve(following: Following, host: str, port: int, token: str | None) -> None:
    """Serve the page of a run until Ctrl-C."""
    # Idle priority: where both want a core, the run has it.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with closing(LivePage(following, host, port, workers_now, token)) as page:
        click.echo(f"{page.address}\nopen it in a browser; Ctrl-C ends it, and not the run")
        try:
            page.run(threading.Event())
        except KeyboardInterrupt:
            click.echo("")


def workers_now(begun: Begun) -> list[dict[str, Any]] | None:
    """Return the status of a run's workers, if its script runs here as this user; else None."""
    try:
        for _, status in running():
            if status["pid"] == begun.pid:
                return list(status["workers"])
    except OSError:
        return None
    return None


def _address(run: str, token: str | None) -> str:
    """Return the address of the events of a page."""
    if _ADDRESS.fullmatch(run):
        if token is None:
            raise ConfigError(f"give --token, which stands in the address of the page at {run}")
        return f"http://{run}/record?token={token}"
    try:
        parts = urlsplit(run)
    except ValueError as error:
        raise ConfigError(f"{run} is no address: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(
            f"{run} is neither the folder of a run nor the address of a page, HOST:PORT or "
            "http://HOST:PORT/?token=..."
        )
    query = parts.query or (f"token={token}" if token else "")
    if "token=" not in query:
        raise ConfigError(f"{run} has no token: give the whole address of the page, or --token")
    return f"{parts.scheme}://{parts.netloc}/record?{query}"


def _events_of(following: Following) -> Iterator[Event | None]:
    """Yield the events in a folder as they come, and None when there is nothing new."""
    wait = threading.Event()
    while True:
        yield from following.new()
        yield None
        wait.wait(EVERY_S)


def _events_at(address: str) -> Iterator[Event | None]:
    """Yield the events that a page sends as they come, and None when there is nothing new."""
    parts, seconds = urlsplit(address), _PATIENCE.total_seconds()
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    try:
        with closing(kind(parts.netloc, timeout=seconds)) as connection:
            connection.request("GET", f"{parts.path}?{parts.query}")
            # The connection's timeout is for each read; this one is for the whole head.
            late = threading.Timer(seconds, connection.sock.shutdown, (socket.SHUT_RDWR,))
            late.start()
            try:
                answer = connection.getresponse()
            finally:
                late.cancel()
                late.join()
            with answer:
                yield from _events_in(answer, parts.netloc)
    except PipelineError:
        raise
    except (OSError, HTTPException, ValueError) as error:
        why = printable(str(error)) or type(error).__name__
        raise ConfigError(f"the page cannot be reached: {why}") from error


def _events_in(answer: HTTPResponse, where: str) -> Iterator[Event | None]:
    """Yield the events of an answer, which anybody may have sent; None where nothing is new."""
    if answer.status != HTTPStatus.OK:
        forbidden = answer.status == HTTPStatus.FORBIDDEN
        reason = "its token is another one" if forbidden else printable(answer.reason)
        raise ConfigError(f"the page refuses: {reason}")
    no_page = ConfigError(f"what answers at {where} is no page of a run, or of another version")
    if answer.headers.get_content_type() != "text/event-stream":
        raise no_page
    rest, some, until = b"", False, Deadline(_PATIENCE)
    while block := answer.read1(1 << 20):
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            try:
                event = unpacked(json.loads(line)) if line.strip() else None
            except (ValueError, TypeError, RecursionError):
                if not some:
                    raise no_page from None
                continue  # of a later version
            some, until = some or event is not None, Deadline(_PATIENCE)
            yield event
        if until.expired() or len(rest) > _LONGEST:
            raise no_page


def _show(events: Iterator[Event | None]) -> None:
    """Show a run in the terminal until it ends."""
    # Drawn in a terminal alone; the other views need no rich.
    from rich.console import Console
    from rich.live import Live

    # As above.
    from pipedream_rt.observers.terminal import view_of

    record, console = RunRecord(), Console()
    first = next(events, None)  # so that an error is raised before anything is shown

    def view() -> Any:
        begun = record.begun
        workers = workers_now(begun) if begun is not None and record.may_run else None
        return view_of(record, workers, console.width)

    with Live(view(), console=console, auto_refresh=False) as live:
        try:
            for event in itertools.chain([first], events):
                if event is not None:
                    record(event)
                    if not isinstance(event, Ended):
                        continue
                live.update(view(), refresh=True)
                if record.begun is not None and not record.may_run and event is None:
                    return
        except KeyboardInterrupt:
            return
