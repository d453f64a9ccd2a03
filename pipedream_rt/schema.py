"""Schemas of what comes from outside: which fields a record or a file has, of which type and size.

A check is a function that says whether a value is right. What has passed can be used without doubt;
what has not is refused with the name of the field, in a text that can be printed.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

Check = Callable[[Any], bool]

_BLOCK = 1 << 20


def text(most: int) -> Check:
    """A text of at most so many characters."""
    return lambda value: isinstance(value, str) and len(value) <= most


def line(most: int) -> Check:
    """A text of at most so many characters, which can be printed."""
    return lambda value: isinstance(value, str) and len(value) <= most and value.isprintable()


def exactly(length: int) -> Check:
    """So many bytes."""
    return lambda value: isinstance(value, bytes) and len(value) == length


def whole(low: int, high: int = 2**63) -> Check:
    """An integer between two others, which may be equal to them."""
    return lambda value: type(value) is int and low <= value <= high


def truth(value: Any) -> bool:
    """True or False."""
    return isinstance(value, bool)


def one_of(*texts: str) -> Check:
    """Return a check for one of some texts."""
    return lambda value: isinstance(value, str) and value in texts


def number(value: Any) -> bool:
    """A number, which is finite."""
    return type(value) in (int, float) and math.isfinite(value)


def seconds(value: Any) -> bool:
    """A number of at least 0, which is finite."""
    return number(value) and value >= 0


def anything(value: Any) -> bool:
    """Any value."""
    return True


def maybe(check: Check) -> Check:
    """None, or what passes another check."""
    return lambda value: value is None or check(value)


def list_of(check: Check, most: int = 1 << 20) -> Check:
    """A list of at most so many values, each of which passes a check."""
    return lambda value: isinstance(value, list) and len(value) <= most and all(map(check, value))


def row(*checks: Check) -> Check:
    """A list with a value for each of several checks."""
    return lambda value: (
        isinstance(value, list)
        and len(value) == len(checks)
        and all(check(each) for check, each in zip(checks, value, strict=True))
    )


def mapping(key: Check, check: Check) -> Check:
    """A dict whose keys and values pass a check each."""
    return lambda value: (
        isinstance(value, dict) and all(map(key, value)) and all(map(check, value.values()))
    )


def fields(checks: Mapping[str, Check], optional: Collection[str] = ()) -> Check:
    """A dict that has these fields and no other.

    Args:
        checks: The check of each field.
        optional: The names of those that may be left out.
    """
    required = checks.keys() - set(optional)
    return lambda value: (
        isinstance(value, dict)
        and required <= value.keys() <= checks.keys()
        and all(check(value[name]) for name, check in checks.items() if name in value)
    )


def problem_of(record: Mapping[str, Any], checks: Mapping[str, Check]) -> str:
    """Say which field of a record is wrong; empty if none is.

    Args:
        record: The record.
        checks: The fields that it has to have. One that may be None may be left out.
    """
    for name, check in checks.items():
        if not check(record.get(name)):
            return f"its {name!r} is {printable(repr(record.get(name)), 60)}"
    return ""


def printable(text: str, most: int = 300) -> str:
    """Return a text from outside as it may be printed: escaped, and no longer than so much.

    A stranger's text could move the cursor of a terminal, or look like a line of the log.
    """
    cut = text[:most] + ("..." if len(text) > most else "")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def open_file(path: str | os.PathLike[str], *, follow: bool = True) -> BinaryIO:
    """Open a file to read that somebody else may have made.

    Args:
        path: The file.
        follow: Whether it may be a link to another file.

    Raises:
        OSError: It cannot be opened, or is a pipe or a device, which might never end; or a folder.
        ValueError: Its name has a NUL.
    """
    # Not to wait for the other end of a pipe.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    file = open(os.open(Path(path), flags), "rb")  # noqa: SIM115 - the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no ordinary file")
    return file


def write_file(path: str | os.PathLike[str], *parts: bytes | memoryview) -> None:
    """Write a file, which takes the place of one that is there when all of it is written.

    Args:
        path: The file.
        *parts: Its bytes, in their order.

    Raises:
        OSError: It cannot be written; one that was there is as before.
    """
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with beside.open("wb") as file:
            for part in parts:
                file.write(part)
        beside.replace(path)
    except OSError:
        with suppress(OSError):
            beside.unlink()
        raise


def read_file(path: str | os.PathLike[str], most: int, *, follow: bool = True) -> bytes:
    """Return the bytes of a file that somebody else may have made.

    Args:
        path: The file.
        most: Bytes that it may have.
        follow: Whether it may be a link to another file.

    Raises:
        OSError: It cannot be read, or is no ordinary file.
        ValueError: It is larger, or its name has a NUL.
    """
    with open_file(path, follow=follow) as file:
        size = os.fstat(file.fileno()).st_size
        data = bytearray()
        # In blocks: a read of so many bytes would ask for the memory at once.
        while size <= most and len(data) <= most and (block := file.read(_BLOCK)):
            data += block
        if max(size, len(data)) > most:
            raise ValueError(f"it has {max(size, len(data))} bytes, more than {most}")
        return bytes(data)
