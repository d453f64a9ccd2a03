"""Show that a change of words changed nothing else: the code of two checkouts, file by file.

Docstrings and comments are left out, and so is where a line ends. A file whose code differs is
named; where only texts in it differ (messages of errors and of the log), these are shown.

    python benchmarks/same_code.py ../old       # exit code 1 if code differs, 0 if texts alone do
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from support.rooms import library_files  # noqa: E402


class _Bare(ast.NodeTransformer):
    """Takes docstrings out of a tree, and texts too if asked; notes the texts."""

    def __init__(self, texts: bool) -> None:
        self._texts = texts
        self.found: list[str] = []

    def generic_visit(self, node: ast.AST) -> ast.AST:
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [each for each in body if not _says_nothing(each)]
            node.body = kept or ([ast.Pass()] if body else [])  # type: ignore[attr-defined]
        return super().generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str):
            self.found.append(node.value)
            if self._texts:
                return ast.Constant("")
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        self.found.append(ast.unparse(node))
        return ast.Constant("") if self._texts else node


def _says_nothing(node: ast.stmt) -> bool:
    """Whether a statement is a text, an ellipsis or `pass`."""
    if isinstance(node, ast.Pass):
        return True
    value: Any = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and (value.value is ... or isinstance(value.value, str))


def bare(source: str, *, texts: bool = False) -> tuple[str, list[str]]:
    """Return the code of a source without its words, and the texts in it."""
    without = _Bare(texts)
    return ast.dump(without.visit(ast.parse(source))), without.found


def main(old: Path) -> int:
    """Compare; return the exit code."""
    names = {str(path.relative_to(root)) for root in (ROOT, old) for path in library_files(root)}
    same, worded, differ = 0, 0, 0
    for name in sorted(names):
        if not ((ROOT / name).exists() and (old / name).exists()):
            differ += 1
            print(f"{name}: only in one of them")
            continue
        before, after = (old / name).read_text(), (ROOT / name).read_text()
        (code, was), (code_now, is_now) = bare(before), bare(after)
        if code == code_now:
            same += 1
        elif bare(before, texts=True)[0] == bare(after, texts=True)[0]:
            worded += 1
            print(f"{name}: the texts differ")
            print(*(f"  - {text!r}" for text in was if text not in is_now), sep="\n")
            print(*(f"  + {text!r}" for text in is_now if text not in was), sep="\n")
        else:
            differ += 1
            print(f"{name}: the code differs")
    print(
        f"{same} files have the same code, {worded} other texts in the same code, {differ} differ"
    )
    return 1 if differ else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
