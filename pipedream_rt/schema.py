"""Schemas of data from outside: the fields of a record or a file, with their types and sizes.

A check is a function that says whether a value is valid. A value that fails is refused with the
name of its field, in a text that is safe to print. Here are also reading and writing of files that
somebody else may have made.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import re
import reprlib
import secrets
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, BinaryIO, get_args, get_origin, get_type_hints

Check = Callable[[Any], bool]

_BLOCK = 1 << 20

_MOST_LINKS = 40
"""Symbolic links that may be followed one after another, as in the kernel."""


def text(most: int) -> Check:
    """A text of at most so many characters."""
    return lambda value: isinstance(value, str) and len(value) <= most


def line(most: int) -> Check:
    """A printable text of at most so many characters."""
    return lambda value: isinstance(value, str) and len(value) <= most and value.isprintable()


def exactly(length: int) -> Check:
    """Exactly so many bytes."""
    return lambda value: isinstance(value, bytes) and len(value) == length


def whole(low: int, high: int = 2**63) -> Check:
    """An integer between two others, inclusive."""
    return lambda value: type(value) is int and low <= value <= high


def truth(value: Any) -> bool:
    """True or False."""
    return isinstance(value, bool)


def one_of(*texts: str) -> Check:
    """One of these texts."""
    return lambda value: isinstance(value, str) and value in texts


def number(value: Any) -> bool:
    """A finite number; of integers, one that a float can hold."""
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:
        return False


def seconds(value: Any) -> bool:
    """A finite number of at least 0."""
    return number(value) and value >= 0


def real(value: Any) -> bool:
    """A number, finite or not; of integers, one that a float can hold."""
    return type(value) is float or whole(-(2**63))(value)


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
    """A dict with these fields and no others; ``optional`` ones may be left out."""
    required = checks.keys() - set(optional)
    return lambda value: (
        isinstance(value, dict)
        and required <= value.keys() <= checks.keys()
        and all(check(value[name]) for name, check in checks.items() if name in value)
    )


_MOST_TEXT = 1 << 20

_OF_TYPES: dict[Any, Check] = {
    Any: anything, bool: truth, int: whole(0), float: real, str: text(_MOST_TEXT),
}  # fmt: skip


def checks_of(cls: type) -> dict[str, Check]:
    """Derive the check of each field of a dataclass, as it comes from a file, from its annotation.

    ``Annotated[type, check]`` gives a check of its own. Else integers are at least 0, numbers may
    be infinite, texts have a length that is bounded, and lists stand for tuples.
    """
    hints = get_type_hints(cls, include_extras=True)
    return {each.name: _check_of(hints[each.name]) for each in dataclasses.fields(cls)}


def _check_of(hint: Any) -> Check:
    """Derive the check of an annotation."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return parts[1]  # type: ignore[no-any-return]
    if hint in _OF_TYPES:
        return _OF_TYPES[hint]
    if origin in (list, tuple):
        return list_of(_check_of(parts[0]))
    if origin is dict:
        return mapping(*map(_check_of, parts))
    if origin is UnionType and type(None) in parts:
        (other,) = (each for each in parts if each is not type(None))
        return maybe(_check_of(other))
    raise TypeError(f"no check follows from {hint!r}; give Annotated[..., check]")


def has_levels(value: Any, most: int) -> bool:
    """Whether a value has at most so many levels of lists and dicts; it is not recursive."""
    level = [value]
    for _ in range(most):
        held = [each for each in level if isinstance(each, list | dict)]
        level = [v for each in held for v in (each.values() if isinstance(each, dict) else each)]
    return not any(isinstance(each, list | dict) for each in level)


def problem_of(record: Mapping[str, Any], checks: Mapping[str, Check]) -> str:
    """Return in words which field of a record is wrong; empty if none. Absent ones are None."""
    for name, check in checks.items():
        if not check(record.get(name)):
            return f"its {name!r} is {shown(record.get(name), 60)}"
    return ""


def is_utf8(text: str) -> bool:
    """Whether a text can be written as UTF-8: it has no lone surrogates, as PEP 383 makes them."""
    return text.isascii() or text.encode(errors="replace").decode() == text


_MOST_DIGITS = 18
"""Digits of a number that a person writes. Python itself refuses to read thousands."""


def is_count(text: str) -> bool:
    """Whether a text is an integer of at least 0 with a plausible number of digits."""
    return text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS


def printable(text: str, most: int = 300) -> str:
    """Return a text from outside for printing: escaped, and cut to so many characters."""
    # A stranger's text could move the cursor of a terminal, or forge a line of the log.
    cut = text[:most] + ("..." if len(text) > most else "")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def shown(value: Any, most: int = 300) -> str:
    """Return a value from outside for printing, as `printable` does a text; of any depth."""
    return printable(_REPR.repr(value), most)


_REPR = reprlib.Repr()
"""Shows six levels, where `repr` takes a call for each level of a value."""

_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 1 << 10


def open_file(path: str | os.PathLike[str], *, follow: bool = True) -> BinaryIO:
    """Open an ordinary file for reading, which somebody else may have made. OSError for any other.

    ``follow``: whether it may be a symbolic link.
    """
    # O_NONBLOCK, since opening a pipe waits for its other end.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    fd = os.open(Path(path), flags)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(
            number, os.strerror(number) if number == errno.EISDIR else "it is no ordinary file"
        )
    return open(fd, "rb")


def write_file(path: str | os.PathLike[str], *parts: bytes | memoryview) -> None:
    """Write a file atomically: it replaces an older one when all of it is written.

    A terminal, a pipe or a device, such as ``/dev/null``, cannot be replaced and is written to; so
    is a file that a process has open, such as ``/dev/stdout``. A file that cannot be replaced, as
    one that is mounted by itself, is written in place. If writing fails with an OSError, a file
    that would have been replaced is as before.
    """
    path = _destination(Path(path))
    try:
        there = os.stat(path)
    except FileNotFoundError:
        there = None
    except ValueError as error:  # its name has a NUL
        raise OSError(errno.EINVAL, str(error)) from error
    if _OPEN_FILES.fullmatch(str(path.parent)) or (there and not stat.S_ISREG(there.st_mode)):
        _write_through(path, there, parts)
        return
    try:
        _replace(path, there, parts)
    except OSError as error:
        if there is None or error.errno not in _IRREPLACEABLE:
            raise
        with open(os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW), "wb") as file:
            file.writelines(parts)


def takes_output(mode: int) -> bool:
    """Whether output may go to a file of this ``stat`` mode: no folder, disk or socket."""
    return stat.S_ISREG(mode) or stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)


_OPEN_FILES = re.compile(r"/proc/(\d+)(/task/\d+)?/fd")
"""Folders in which the kernel shows the open files of a process."""

_IRREPLACEABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.EXDEV)
"""Errors of a folder in which nothing can be made, or of a file that is mounted by itself."""


def _destination(path: Path) -> Path:
    """Return the target of a path through symbolic links, but not of those in `_OPEN_FILES`."""
    try:
        for _ in range(_MOST_LINKS):
            folder = Path(os.path.realpath(path.parent))
            path = folder / path.name
            if _OPEN_FILES.fullmatch(str(folder)) or not path.is_symlink():
                return path
            # As the kernel's protected_symlinks: in a folder such as /tmp, anybody could plant a
            # link to a file that only this user may write.
            around, owner = folder.stat(), path.lstat().st_uid
            open_to_all = stat.S_IWOTH | stat.S_ISVTX
            if around.st_mode & open_to_all == open_to_all and owner not in (
                os.geteuid(),
                around.st_uid,
            ):
                raise OSError(errno.EACCES, "a link of another user, in a folder open to all")
            path = folder / path.readlink()
    except ValueError as error:  # its name has a NUL
        raise OSError(errno.EINVAL, str(error)) from error
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _write_through(
    path: Path, there: os.stat_result | None, parts: Sequence[bytes | memoryview]
) -> None:
    """Write to something other than a file, or to an open file of a process."""
    opened, mode = _OPEN_FILES.fullmatch(str(path.parent)), there.st_mode if there else 0
    if not takes_output(mode):
        raise OSError(errno.EINVAL, "it is neither a file nor a pipe nor a terminal")
    if stat.S_ISREG(mode) and opened is not None and int(opened[1]) == os.getpid():
        fd = os.dup(int(path.name))  # opened anew, it would write at the start of the file
    else:
        fd = open_to_append(path, os.O_WRONLY | os.O_APPEND)
    with open(fd, "wb") as file:
        file.writelines(parts)


def _replace(path: Path, there: os.stat_result | None, parts: Sequence[bytes | memoryview]) -> None:
    """Write a file under another name with owner and mode of the old one, and rename it."""
    beside = path.with_name(f".{secrets.token_hex(8)}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(beside, flags, 0o666), "wb") as file:
            if there is not None:
                with suppress(PermissionError):  # the old one is another user's
                    os.fchown(file.fileno(), there.st_uid, there.st_gid)
                    os.fchmod(file.fileno(), stat.S_IMODE(there.st_mode))
            file.writelines(parts)
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise


def open_to_append(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file, as the opener of `open`; an OSError for a pipe without a reader."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
    os.set_blocking(fd, True)
    return fd


def read_file(path: str | os.PathLike[str], most: int, *, follow: bool = True) -> bytes:
    """Return the bytes of a file that somebody else may have made; ValueError if over ``most``."""
    with open_file(path, follow=follow) as file:
        size = os.fstat(file.fileno()).st_size
        data = bytearray()
        # In blocks, since a read of ``most`` bytes would allocate them at once.
        while size <= most and len(data) <= most and (block := file.read(_BLOCK)):
            data += block
        if max(size, len(data)) > most:
            raise ValueError(f"it has {max(size, len(data))} bytes, more than {most}")
        return bytes(data)
