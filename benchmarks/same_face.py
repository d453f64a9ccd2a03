"""What users see of two checkouts: names, commands, environment, checkpoints, events, traces.

For a change that should change none of it. Each checkout describes itself in a process of its
own; a checkpoint, a record and a trace are those of one small run in one thread.

    python benchmarks/same_face.py ../old       # prints what differs; exit code 1 if anything does
"""

from __future__ import annotations

import difflib
import enum
import hashlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from support.rooms import library_files  # noqa: E402

PACKAGES = (
    "pipedream_rt", "pipedream_rt.codecs", "pipedream_rt.corrections", "pipedream_rt.observe",
    "pipedream_rt.observers", "pipedream_rt.optimizers", "pipedream_rt.schedules",
    "pipedream_rt.simulation",
)  # fmt: skip
"""Those that users import; a package of extras (`hf`) needs what may not be installed."""


def _text(value: Any) -> str:
    """Return a value or a signature as a text that names no place in memory, and no module."""
    text = re.sub(r" at 0x[0-9a-f]+", "", str(value))
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", text)


def _signature(value: Any) -> str:
    try:
        return _text(inspect.signature(value))
    except (TypeError, ValueError):
        return ""


def _members(cls: type) -> Iterator[str]:
    """Yield the public members of a class, its own and those that it inherits in this library."""
    for base in cls.__mro__:
        if not base.__module__.startswith("pipedream_rt"):
            continue
        for name, value in vars(base).items():
            if not name.startswith("_"):
                plain = value.__func__ if isinstance(value, classmethod | staticmethod) else value
                yield f"{name}{_signature(plain) if callable(plain) else ''}"
        yield from (f"{name}: {_text(a)}" for name, a in inspect.get_annotations(base).items())


def names() -> dict[str, Any]:
    """Return the public names with their signatures and members."""
    found = {}
    for module in [import_module(package) for package in PACKAGES]:
        for name in sorted(module.__all__):
            value = getattr(module, name)
            told: dict[str, Any] = {"signature": _signature(value) if callable(value) else ""}
            if isinstance(value, type):
                told["members"] = sorted(set(_members(value)))
                told["bases"] = [base.__name__ for base in value.__mro__]
                if issubclass(value, enum.Enum):
                    told["values"] = [[each.name, str(each.value)] for each in value]
            found[f"{module.__name__}.{name}"] = told
    return found


def commands() -> dict[str, Any]:
    """Return the verbs of the command with their options, and the help of each."""
    import click

    from pipedream_rt.cli import main

    found: dict[str, Any] = {}

    def visit(command: click.Command, words: str) -> None:
        parameters = [
            [type(each).__name__, each.name, list(each.opts), _text(each.type), _text(each.default)]
            for each in command.params
        ]
        context = click.Context(command, info_name=words)
        found[words] = {"parameters": parameters, "help": command.get_help(context)}
        for name, each in getattr(command, "commands", {}).items():
            visit(each, f"{words} {name}")

    visit(main, "pipedream-rt")
    return found


def variables(root: Path) -> list[str]:
    """Return the environment variables that the code names."""
    texts = (path.read_text() for path in library_files(root))
    return sorted({name for text in texts for name in re.findall(r"PIPEDREAM_RT_\w+", text)})


def _keys(value: Any) -> Any:
    """Return the names in a value of JSON, and the types of the rest."""
    if isinstance(value, dict):
        return {name: _keys(each) for name, each in sorted(value.items())}
    if isinstance(value, list):
        return [_keys(each) for each in value[:1]]
    return type(value).__name__


def files() -> dict[str, Any]:
    """Train a little; return what the files of the run hold: layouts, names, digests of weights."""
    import msgpack
    import torch
    from safetensors import safe_open

    from pipedream_rt import Checkpoints, Observe, Pipeline

    torch.manual_seed(0)
    torch.set_num_threads(1)
    nn = torch.nn
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    data = [(torch.randn(8, 4), torch.randn(8, 2)) for _ in range(8)]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        with Pipeline(
            model, stages=2, loss_fn=nn.functional.mse_loss, micro_batches=2, workers="serial",
            optimizer=(torch.optim.AdamW, {"lr": 0.01}), checkpoint=Checkpoints(root / "saved"),
            observe=Observe(record=root / "record", trace=True),
        ) as pipe:  # fmt: skip
            found["losses"] = [result.loss.hex() for result in pipe.train_epoch(data)]
            pipe.save()
            pipe.trace().save(root / "trace")
        for path in sorted((root / "saved").rglob("*")):
            name = str(path.relative_to(root))
            if path.suffix == ".safetensors":
                with safe_open(path, "pt") as tensors:
                    found[name] = {
                        key: hashlib.sha256(tensors.get_tensor(key).numpy().tobytes()).hexdigest()
                        for key in sorted(tensors.keys())
                    }
            elif path.suffix == ".json":
                found[name] = _keys(json.loads(path.read_text()))
            else:
                found[name] = "there"
        lines = [json.loads(x) for x in (root / "record" / "events.jsonl").read_text().splitlines()]
        found["events"] = {line["event"]: _keys(line) for line in lines}
        unpacker = msgpack.Unpacker(raw=False)
        unpacker.feed((root / "trace").read_bytes())
        magic, version, packed, _ = next(unpacker)
        found["trace"] = [magic, version, _keys(msgpack.unpackb(packed))]
    return found


def told(root: Path) -> dict[str, Any]:
    """Return what a checkout says of itself."""
    with tempfile.TemporaryDirectory() as folder:
        code = "import sys; sys.path[:0] = sys.argv[1:3]; import same_face; same_face.tell()"
        done = subprocess.run(
            [sys.executable, "-c", code, str(root), str(Path(__file__).parent)],
            cwd=folder, stdout=subprocess.PIPE, text=True, check=True,
            env={**os.environ, "PYTHONPATH": str(root), "COLUMNS": "80"},
        )  # fmt: skip
    return {**json.loads(done.stdout), "variables": variables(root)}


def tell() -> None:
    """Print what the library that is imported shows, as JSON."""
    print(json.dumps({"names": names(), "commands": commands(), "files": files()}))


def main(old: Path) -> int:
    """Print what differs; return the exit code."""
    before, after = (
        json.dumps(told(root), indent=1, sort_keys=True).splitlines() for root in (old, ROOT)
    )
    differs = list(difflib.unified_diff(before, after, "old", "this", lineterm="", n=2))
    print(*differs, sep="\n")
    print(f"{len(after)} lines tell of this checkout; {'they differ' if differs else 'the same'}")
    return 1 if differs else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]).resolve()))
