"""Every block of Python in README and docs runs as it stands.

A block is a whole program, unless its first line is ``# goes on``: then it continues the block
above it on the page. A page's programs run in a folder of their own.
"""

import contextlib
import importlib
import re
import secrets
import sys
import textwrap
from pathlib import Path

import pytest
from support import forked
from support.deadlines import LATEST_S
from support.ports import free_port

from pipedream_rt import ConfigError
from pipedream_rt.planning import profiling

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
GOES_ON = "# goes on\n"
NEEDED = {
    "docs/guide/any-model.md": ("transformers", "needs the extra hf"),
    "docs/guide/trainer.md": ("accelerate", "needs the extra hf"),
}
ELSEWHERE = "docs/guide/several-machines.md"


def blocks(path):
    """The blocks of Python of a page, with the number of the line at which each begins."""
    fence = re.compile(r"^( *)```python\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
    text = path.read_text()
    for found in fence.finditer(text):
        yield text.count("\n", 0, found.start(2)) + 1, textwrap.dedent(found[2])


def programs():
    """The programs of all pages: where each begins, and its blocks with their lines."""
    found = []
    for path in PAGES:
        for line, block in blocks(path):
            if block.startswith(GOES_ON):
                assert found, f"{path.name}:{line} goes on, and there is no block above it"
                assert found[-1][0] == path, f"{path.name}:{line} goes on with another page"
                found[-1][2].append((line, block))
            else:
                found.append((path, line, [(line, block)]))
    return found


def named(program):
    path, line, _ = program
    return f"{path.relative_to(ROOT)}:{line}"


def test_pages_have_blocks():
    assert len(programs()) > 15


@contextlib.contextmanager
def workers(count, monkeypatch):
    """Workers that join at an address, which is the argument of the script."""
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("PIPEDREAM_RT_SECRET", secrets.token_hex(32))
    monkeypatch.setattr(sys, "argv", ["train.py", address])
    command = [sys.executable, "-m", "pipedream_rt.workers", address, "--name"]
    started = [forked.Popen([*command, f"node{i}"], cwd=ROOT) for i in range(count)]
    try:
        yield
        assert [each.wait(LATEST_S) for each in started] == [0] * count
    finally:
        for each in started:
            each.kill()
            each.wait()


@pytest.mark.processes
@pytest.mark.parametrize("program", programs(), ids=named)
def test_it_runs_as_it_stands(program, tmp_path, monkeypatch):
    path, _, parts = program
    page = str(path.relative_to(ROOT))
    if needed := NEEDED.get(page):
        pytest.importorskip(needed[0], reason=needed[1])
        importlib.import_module("tqdm").tqdm.monitor_interval = 0  # its thread outlives a test
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(profiling, "_process_bytes", lambda: 1e8)  # it starts an interpreter
    with workers(2, monkeypatch) if page == ELSEWHERE else contextlib.nullcontext():
        try:
            run(path, parts)
        except ConfigError as error:
            if "Other processes may be using the machine" not in str(error):
                raise
            pytest.skip(f"this machine is too busy to measure layers on: {error}")


def run(path, parts):
    """Run the blocks of a program one after another; errors name the line of the page."""
    namespace = {"__name__": "__main__"}
    for line, block in parts:
        exec(compile("\n" * (line - 1) + block, str(path), "exec"), namespace)
