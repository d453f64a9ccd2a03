"""The figures of the house: how large the library is, and which rooms one micro-batch goes through.

Lines, classes and conditions are read from the sources. The way of a micro-batch is measured: three
stages are trained in one thread (``workers="serial"``, one micro-batch per update), and every call
of a function of the library is noted, in the coordinator and the stages together.

    python benchmarks/house.py            # of this checkout
    python benchmarks/house.py ../old     # of another one, which has an environment in .venv
    python benchmarks/house.py --map      # the drawing in docs/design/index.md

Prints one line for each figure.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import textwrap
import tokenize
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from support.rooms import OPTIONAL, ROOMS, is_optional, library_files  # noqa: E402

WITHIN = ("stage.py", "loop.py", "hosted.py", "exchange.py", "values.py")
"""The files between a message and a stage, whose conditions are counted together."""

MICRO_BATCHES = 40

WAY = {
    "pipeline.py": 1, "coordinator/feed/feeder": 2, "coordinator/recovery/group": 3,
    "transport/sockets": 4, "messages/inbox": 5, "stage/loop": 6, "schedules/plan": 7,
    "stage/stage": 8, "stage/parameters": 9, "coordinator/recovery/coordinator_inbox": 10,
}  # fmt: skip
"""The way of one micro-batch, as the reading order follows it."""


def drawn_map(root: Path = ROOT) -> str:
    """The map of the library: every folder with its files."""
    width, found = 102, []
    base = root / "pipedream_rt"
    above = sorted(
        f"{p.name} ○" if p.name in OPTIONAL else p.name
        for p in base.glob("*.py")
        if p.name not in ("__init__.py", "pipeline.py")
    )
    found.append("pipedream_rt/")
    found += textwrap.wrap(", ".join(above), width, initial_indent="  ", subsequent_indent="  ")
    drawn = [[(room, what) for room, what in row if what] for row in ROOMS]
    for number, row in enumerate(filter(None, drawn)):
        found.append(("  ┌" if not number else "  ├") + "─" * width + ("┐" if not number else "┤"))
        for room, what in row:
            folder = base / room if (base / room).exists() else root / room
            names = sorted(p.stem for p in folder.glob("*.py") if p.stem != "__init__")
            steps = {n: WAY.get(f"{room}/{n}", WAY.get(room)) for n in names or [room]}
            marked = [
                f"{n} [{step}]" if step else f"{n} ○" if f"{room}/{n}.py" in OPTIONAL else n
                for n, step in steps.items()
            ]
            mark = " ○" if is_optional(f"pipedream_rt.{room.replace('/', '.')}") else ""
            title = f"{room}/{mark}" if names else marked[0]
            listed = textwrap.wrap(", ".join(marked), 50) if names else [""]
            for i, part in enumerate(listed):
                cells = f"{title if not i else '':<27}{part:<52}{what if not i else '':<21}"
                found.append(f"  │ {cells} │")
    found.append("  └" + "─" * width + "┘")
    return "\n".join(found)


def sources(root: Path) -> dict[str, str]:
    """The text of every file of the library, by its path from the root."""
    return {str(path.relative_to(root)): path.read_text() for path in library_files(root)}


def kinds_of_lines(text: str) -> tuple[int, int, int]:
    """The numbers of lines of code, of docs, and of lines with a comment that says something."""
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for each in body:  # a docstring, or the one of an attribute
            value = each.value if isinstance(each, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docs.update(range(each.lineno, (each.end_lineno or each.lineno) + 1))
    nothing = (
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
        tokenize.ENCODING, tokenize.ENDMARKER,
    )  # fmt: skip
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    used = {
        line
        for token in tokens
        if token.type not in nothing
        for line in range(token.start[0], token.end[0] + 1)
    }
    comments = {
        token.start[0]
        for token in tokens
        if token.type == tokenize.COMMENT and not re.match(r"# (noqa|type:|fmt:|--)", token.string)
    }
    return len(used - docs), len(docs), len(comments)


def figures(root: Path) -> dict[str, object]:
    """The figures that are read from the sources."""
    texts = sources(root)
    trees = {name: ast.parse(text) for name, text in texts.items()}
    kinds = (ast.If, ast.IfExp, ast.match_case)
    conditions = {
        name: sum(isinstance(node, kinds) for node in ast.walk(tree))
        for name, tree in trees.items()
    }
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    classes = {
        f"{node.name} ({name})": sum(isinstance(each, functions) for each in node.body)
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    of_pipeline = next(
        each.args
        for node in ast.walk(trees["pipedream_rt/pipeline.py"])
        if isinstance(node, ast.ClassDef) and node.name == "Pipeline"
        for each in node.body
        if isinstance(each, ast.FunctionDef) and each.name == "__init__"
    )
    lengths = {name: text.count("\n") for name, text in texts.items()}
    largest, most = max(lengths, key=lambda n: lengths[n]), max(classes, key=lambda n: classes[n])
    code, docs, comments = map(sum, zip(*map(kinds_of_lines, texts.values()), strict=True))
    tests = {path.stem.removeprefix("test_") for path in (root / "tests").rglob("test_*.py")}
    untested = [name for name in texts if Path(name).stem not in {*tests, "__init__", "__main__"}]
    of_stage = {n: c for n, c in conditions.items() if n.startswith("pipedream_rt/stage/")}
    return {
        "files": len(texts),
        "lines": sum(lengths.values()),
        "lines of code": code,
        "lines of docs": docs,
        "lines of comments": f"{comments} ({comments / sum(lengths.values()):.1%})",
        "modules without a test of their name": len(untested),
        "largest file": f"{lengths[largest]} ({largest})",
        "most methods": f"{classes[most]} of {most}",
        "methods of Stage": classes["Stage (pipedream_rt/stage/stage.py)"],
        "conditions in stage, loop and what is between": sum(
            count for name, count in of_stage.items() if name.rsplit("/", 1)[-1] in WITHIN
        ),
        "parameters of Pipeline": len(of_pipeline.args) + len(of_pipeline.kwonlyargs) - 1,
    }


class Walk:
    """Counts the calls of functions of the library, and how often a call enters another file.

    Attributes:
        files: By file, the number of micro-batches that have entered it.
    """

    def __init__(self) -> None:
        self.calls = self.changes = 0
        self.files: Counter[str] = Counter()
        self._entered: set[str] = set()
        self._within: list[str] = []

    def end(self) -> None:
        """End a micro-batch."""
        self.files.update(self._entered)
        self._entered.clear()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note an event of `sys.setprofile`."""
        name = frame.f_code.co_filename
        if "/pipedream_rt/" not in name:
            return
        if event == "call":
            self.calls += 1
            self._entered.add(name)
            if self._within and self._within[-1] != name:
                self.changes += 1
            self._within.append(name)
        elif event == "return" and self._within:
            self._within.pop()


def walk() -> dict[str, object]:
    """The way of a micro-batch through this checkout."""
    import torch
    from torch import nn

    from pipedream_rt import Pipeline

    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    data = [(torch.ones(2, 4), torch.ones(2, 4))] * (MICRO_BATCHES + 10)
    with Pipeline(
        model, stages=3, loss_fn=nn.functional.mse_loss, optimizer=(torch.optim.SGD, {"lr": 0.1}),
        micro_batches=1, corrections=(), workers="serial",
    ) as pipe:  # fmt: skip
        results = pipe.train_epoch(data)
        for _ in range(5):
            next(results)
        seen = Walk()
        sys.setprofile(seen)
        for _ in range(MICRO_BATCHES):
            next(results)
            seen.end()
        sys.setprofile(None)
    # What is done now and then, as a comparison at each doubling, is not its way.
    often = [name for name, count in seen.files.items() if count >= MICRO_BATCHES / 2]
    return {
        "files that a micro-batch enters": len(often),
        "changes of file": round(seen.changes / MICRO_BATCHES),
        "calls": round(seen.calls / MICRO_BATCHES),
    }


@click.command()
@click.argument("root", type=click.Path(exists=True, path_type=Path), default=ROOT)
@click.option("--map", "only_map", is_flag=True, help="Draw the map of the library.")
@click.option("--walk", "only_walk", is_flag=True, hidden=True)
def main(root: Path, only_map: bool, only_walk: bool) -> None:
    """Print the figures of the checkout ROOT."""
    if only_map:
        click.echo(drawn_map(root))
        return
    if only_walk:
        for name, value in walk().items():
            print(f"{name}: {value}")
        return
    for name, value in figures(root).items():
        print(f"{name}: {value}", flush=True)
    command = [root.resolve() / ".venv/bin/python", __file__, "--walk"]
    subprocess.run(command, check=True, cwd=root)


if __name__ == "__main__":
    main()
