"""The linter's rule for docstrings: complete for what users call, one thought for the rest.

Public is what a package that users import lists in ``__all__``, what the reference shows, and the
commands. There everything has docs. Inside, a docstring says more than the name, in prose: the
sections of arguments are for users, and a class may list the attributes whose unit, shape,
invariant or owner their type does not show. Reasons stand as comments beside their lines.

    PYTHONPATH=tests python -m support.docstrings     # prints what breaks the rule
"""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path

from support.rooms import library_files

ROOT = Path(__file__).resolve().parents[2]
INNER = {"cli", "cluster.engines", "checkpoint", "models"}
"""Packages whose ``__all__`` is for other rooms of the library, not for users."""

SECTION = re.compile(r"^ *(Args|Returns|Raises|Yields|Attributes):$", re.MULTILINE)
_FILLERS = """
    a all an and are as at by each every for from gets has have in into is it its itself
    make makes new of on one or return returns set sets that the them these they this to
    was what when where whether which with yield yields
"""


def sources():
    """Return the files of the library."""
    return library_files(ROOT)


@cache
def tree(path):
    """Return the parsed source of a file."""
    return ast.parse(path.read_text())


def _path_of(module):
    """Return the file of a module of the library; None if there is none."""
    base = ROOT.joinpath(*module.split("."))
    found = (base.with_suffix(".py"), base / "__init__.py")
    return next((path for path in found if path.exists()), None)


def _home(path, name):
    """Return the file that defines a name which another file imports."""
    for node in ast.walk(tree(path)):
        names = getattr(node, "names", ()) if isinstance(node, ast.ImportFrom) else ()
        if name in (alias.asname or alias.name for alias in names):
            origin = _path_of(node.module or "")
            return _home(origin, name) if origin is not None else path
    return path


def _listed(path):
    """Return what a file lists in ``__all__``."""
    for node in tree(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


@cache
def public():
    """Return (file, name) of what users call, each name as at the top level of its file."""
    found = set()
    for path in sources():
        room = ".".join(path.relative_to(ROOT).parts[1:-1])
        if path.name == "__init__.py" and room not in INNER:
            found |= {(_home(path, name), name) for name in _listed(path)}
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        for shown in re.findall(r"^::: ([\w.]+)", page.read_text(), re.MULTILINE):
            module, _, name = shown.rpartition(".")
            if (path := _path_of(module)) and not _path_of(shown):
                found.add((_home(path, name), name))
    return found


def _is_command(node):
    """Whether the docs of a function are the help of a command."""
    calls = (ast.unparse(each) for each in getattr(node, "decorator_list", ()))
    return any(re.search(r"\b(command|group)\b", call) for call in calls)


def documented(path):
    """Yield (node, name, whether it is public) of all that may have docs in a file."""

    def below(node, outer, is_public):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = child.name
                if outer is None:
                    shown = (path, name) in public() or _is_command(child)
                else:
                    shown = is_public and (name == "__call__" or not name.startswith("_"))
                yield child, f"{outer}.{name}" if outer else name, shown
                inner = shown and isinstance(child, ast.ClassDef)
                yield from below(child, f"{outer}.{name}" if outer else name, inner)
            else:
                yield from below(child, outer, is_public)

    yield from below(tree(path), None, False)


def _stems(text):
    """Return the words of a text without their endings."""
    words = re.findall(r"[A-Za-z][a-z]*", text.replace("_", " "))
    return {re.sub(r"(ies|es|s|ed|ing|e|y)$", "", word.lower()) for word in words}


def complaints():
    """Yield (file, line, what is wrong)."""
    errors = ROOT / "pipedream_rt" / "errors.py"
    for path in sources():
        for node, name, is_public in documented(path):
            docs = ast.get_docstring(node)
            if node.name == "__init__":
                if docs is not None:
                    yield path, node.lineno, f"{name}: its class has the docs"
            elif docs is None and is_public and not _has_its_docs_elsewhere(node):
                yield path, node.lineno, f"{name} is public and has no docs"
            if docs is not None and isinstance(node, ast.ClassDef):
                for listed in sorted(_listed_attributes(docs) - _attributes(node)):
                    yield path, node.lineno, f"{name}: its docs list {listed}, which is not there"
            if docs is not None and not is_public and path != errors and node.name != "__init__":
                sections = set(SECTION.findall(docs))
                if isinstance(node, ast.ClassDef):
                    sections.discard("Attributes")
                if sections:
                    yield path, node.lineno, f"{name}: sections are for users: {sorted(sections)}"
                if re.fullmatch(r"See `[^`]*`\.?", docs):
                    yield path, node.lineno, f"{name}: what it overrides has the docs"
                if _stems(docs) - _stems(_FILLERS) <= _stems(name):
                    yield path, node.lineno, f"{name}: its docs say no more than its name"


def _listed_attributes(docs):
    """Return the names in the section of attributes of a docstring."""
    section = re.search(r"^Attributes:\n((?:    .*\n?|\n)*)", docs, re.MULTILINE)
    return set(re.findall(r"^    (\w+):", section[1], re.MULTILINE)) if section else set()


def _attributes(node):
    """Return the names that the body of a class assigns, defines, or uses as attributes."""
    found = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    found |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return found | {each.name for each in node.body if isinstance(each, ast.FunctionDef)}


def _has_its_docs_elsewhere(node):
    """Whether a function is one form of another, or overrides it, which has the docs."""
    return any(
        ast.unparse(each) in ("override", "overload", "typing.override")
        for each in node.decorator_list
    )


def main():
    """Print what is wrong; return the exit code."""
    found = list(complaints())
    for path, line, text in found:
        print(f"{path.relative_to(ROOT)}:{line}: {text}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
