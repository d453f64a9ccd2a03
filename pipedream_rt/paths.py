"""Paths as people give them: with ``~`` and variables, and never an address."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pipedream_rt.errors import ConfigError
from pipedream_rt.schema import printable

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*:/")
"""How an address begins, as ``s3://`` or, once a `Path` was made of it, ``s3:/``."""

_VARIABLE = re.compile(r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([^}]*)\})")

_SHOWN = 200
"""Characters of a path that are shown."""


def given_path(path: str | os.PathLike[str], what: str) -> Path:
    """Return a path that somebody has given as ``what``, with ``~`` and variables expanded.

    A part of it that is there under this very name, with a ``$`` in it, stays as it is. Refuse an
    address such as ``s3://bucket/run``, and a path with a variable or a user that there is not.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(
            f"{what} must be the path of a file or folder, not {printable(repr(text), _SHOWN)}"
        )
    shown = f"{what} is {printable(repr(text), _SHOWN)}"
    text = os.path.expanduser(_with_variables(text, shown))
    _refuse(text, shown)
    home = text.partition("/")[0]
    if home.startswith("~") and not os.path.lexists(home):
        raise ConfigError(
            f"{shown}, and there is no home folder for {printable(home, _SHOWN)!r}; for a name "
            "that begins with ~, give the whole path"
        )
    return Path(text)


def refuse_address(path: str | os.PathLike[str], what: str) -> None:
    """Refuse an address that somebody has given as ``what``, a path that another library reads."""
    _refuse(os.fspath(path), f"{what} is {printable(repr(os.fspath(path)), _SHOWN)}")


def _refuse(text: str, shown: str) -> None:
    """Refuse an address."""
    if is_address(text):
        if text.startswith("file:"):
            local = re.sub("^file:/+(localhost/)?", "/", text)
            raise ConfigError(f"{shown}, an address; give the path itself, {printable(local)!r}")
        raise ConfigError(
            f"{shown}, an address, where a path on a disk was expected: files get their names when "
            "they are whole, which stores of objects cannot do. Mount the bucket and give the path "
            "where it is mounted; or give a folder on a disk, and copy it there or from there, as "
            "by `aws s3 sync`"
        )


def is_address(path: str | os.PathLike[str]) -> bool:
    """Whether a path is an address; ``name:/file`` is none where there is a folder ``name:``."""
    text = os.fspath(path)
    begin = _ADDRESS.match(text)
    if begin is None:
        return False
    return text.startswith("/", begin.end()) or not os.path.isdir(text.partition("/")[0])


def _with_variables(text: str, shown: str) -> str:
    """Return a path with the values of its variables."""
    done: list[str] = []
    for part in text.split("/"):
        if "$" in part and not os.path.lexists("/".join([*done, part])):
            for found in _VARIABLE.finditer(part):
                if os.path.expandvars(found[0]) in ("", found[0]):
                    raise ConfigError(
                        f"{shown}, and the variable {found[1] or found[2]} is not set, or is "
                        "empty: set it, or give the path itself. A name that has a $ in it is "
                        "taken as it is where there is such a file or folder"
                    )
            part = os.path.expandvars(part)
        done.append(part)
    return "/".join(done)
