"""What a program will import that its workers need too, read from its source before it runs.

A module of transformers takes longer to import than torch. So the fork server imports what the
program names while the program does, on another core.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path

_LARGEST = 1 << 20
"""Limit of the source that is read, in bytes."""

COMPILER = "torch._dynamo"
"""The module of torch's compiler, which takes as long to import as torch."""

_OURS = ("torch", "pipedream_rt")
"""Packages that workers have imported in any case."""

_NOT_AT_ONCE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def imports_of(program: str | Path) -> list[str]:
    """Return what a program imports at its start of installed packages that build on torch."""
    with suppress(OSError, ValueError, SyntaxError, RecursionError):
        path = Path(program)
        if path.stat().st_size <= _LARGEST:
            tree = ast.parse(path.read_bytes())
            found = dict.fromkeys(_imported(tree))
            roots = {root: _builds_on_torch(root) for root in map(_root_of, found)}
            compiler = [COMPILER] * any(map(_needs_compiler, ast.walk(tree)))
            return [*(name for name in found if roots[_root_of(name)]), *compiler]
    return []


def _imported(tree: ast.AST) -> Iterator[str]:
    """Yield what a program imports when it is run, outside of functions and classes."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}:{alias.name}" for alias in node.names)
        elif not isinstance(node, _NOT_AT_ONCE):
            yield from _imported(node)


def _needs_compiler(node: ast.AST) -> bool:
    """Whether workers need torch's compiler for this; to recompute activations needs it too."""
    match node:
        case ast.keyword(arg="compile" | "recompute", value=given):
            return not isinstance(given, ast.Constant) or bool(given.value)
        case ast.ImportFrom(module="torch.utils.checkpoint"):
            return True
    return False


def _root_of(name: str) -> str:
    """Return the top-level package of a name."""
    return re.split("[.:]", name)[0]


def _builds_on_torch(package: str) -> bool:
    """Whether an installed package requires torch, if only for an extra."""
    if package in _OURS:
        return False
    with suppress(metadata.PackageNotFoundError, ValueError):
        needs = metadata.distribution(package).requires or ()
        return any(re.match(r"torch(?![\w.-])", each) for each in needs)
    return False
