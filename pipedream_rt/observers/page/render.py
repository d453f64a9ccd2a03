"""The page as HTML: one file that loads nothing from the network."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup

from pipedream_rt import __version__
from pipedream_rt.errors import ConfigError
from pipedream_rt.observers.page.blocks import Panel
from pipedream_rt.observers.page.panels import compared, panels, title_of
from pipedream_rt.observers.run_record import RunRecord
from pipedream_rt.schema import write_file
from pipedream_rt.telling import log_of
from pipedream_rt.tracing.events import Ended, Event

_log = log_of(__name__)


@functools.cache
def _text(name: str) -> str:
    """Return a file beside this one."""
    return files("pipedream_rt.observers.page").joinpath(name).read_text("utf-8")


@functools.cache
def _template() -> Any:
    # Imported only where a page is made.
    from jinja2 import Environment

    return Environment(autoescape=True).from_string(_text("page.html.jinja"))


def inside_of(panel: Panel) -> Markup:
    """Return the content of the section of a panel."""
    head = Markup("<h2>{}</h2>").format(panel.title) if panel.title else Markup("")
    note = Markup('<p class="note">{}</p>').format(panel.note) if panel.note else Markup("")
    return head + panel.body + note


def page_of(title: str, found: Sequence[Panel], *, live: bool = False) -> str:
    """Return a page with some panels; a ``live`` one asks its server for news."""
    page: str = _template().render(
        title=title,
        panels=[(panel, inside_of(panel)) for panel in found],
        live=live,
        style=Markup(_text("style.css")),
        script=Markup(_text("page.js") + (_text("live.js") if live else "")),
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M:%S"),
    )
    return page


def report_of(record: RunRecord) -> str:
    """Return the report of a run, as the text of an HTML file."""
    return page_of(title_of(record), panels(record))


def comparison_of(records: Mapping[str, RunRecord]) -> str:
    """Return a page that sets runs side by side, by name, as the text of an HTML file."""
    return page_of(f"{len(records)} runs", compared(records))


def write_report(path: str | os.PathLike[str], record: RunRecord) -> Path:
    """Write the report of a run into a file, and return its path."""
    return write_page(path, report_of(record))


def write_page(path: str | os.PathLike[str], page: str) -> Path:
    """Write a page into a file, which is replaced as a whole, and return its path."""
    path = Path(path)
    try:
        write_file(path, page.encode(errors="backslashreplace"))
    except OSError as error:
        raise ConfigError(f"the report cannot be written to {path}: {error.strerror}") from error
    return path


class ReportFile:
    """Writes the report of a run when it has ended, however it did. An `Observer`.

    The record must be told of each event first.
    """

    def __init__(self, path: str | os.PathLike[str], record: RunRecord) -> None:
        self._path, self._record = Path(path), record

    def __call__(self, event: Event) -> None:
        """Write the report after the last event, and say where it is."""
        if isinstance(event, Ended) and self._record.begun is not None:
            write_report(self._path, self._record)
            _log.warning("the report of the run is in %s", self._path)
