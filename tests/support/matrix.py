"""Runs a quick selection of the tests with each version of Python and torch that is promised.

Each has an environment of its own in ``.matrix/``. What was found is the table of
``docs/reference/versions.md``; a row whose interpreter is not on this machine stays as it is.

    python tests/support/matrix.py [WORDS]...    only rows that have one of the words, as 3.12
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "versions.md"
BEGIN, END = "<!-- what make matrix has found: begin -->\n", "<!-- end -->\n"

ROWS = [("3.11", "2.9"), ("3.10", "2.13"), ("3.11", "2.13"), ("3.12", "2.13"), ("3.13", "2.13"),
        ("3.11", "newest")]  # fmt: skip
"""Of Python and of torch. The first is the floor of ``setup.cfg``."""

QUICK = [
    "tests/test_layers.py", "tests/test_schema.py", "tests/properties/test_exactness.py",
    "tests/properties/test_determinism.py", "tests/optimizers", "tests/test_pipeline.py",
    "tests/job", "tests/messages", "tests/models", "tests/stage", "tests/transport",
    "tests/cluster/test_processes.py", "tests/cluster/test_without_rights.py",
    "tests/coordinator/recovery/test_recovery.py",
    "tests/coordinator/references/test_stage_reference.py",
]  # fmt: skip

_INSTALL_S, _TESTS_S = 1800, 1200

HEAD = (
    "| Python | torch | NumPy | passed | failed | skipped | seconds |\n"
    "|---|---|---|--:|--:|--:|--:|\n"
)


class Row(NamedTuple):
    """A row of the table."""

    python: str
    torch: str
    numpy: str
    passed: int
    failed: int
    skipped: int
    seconds: int

    def __str__(self):
        """Return it as a line of Markdown."""
        return f"| {' | '.join(map(str, self))} |\n"


def interpreter(version):
    """The path of a Python of a version; None if this machine has none."""
    found = [shutil.which(f"python{version}")]
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    if versions.is_dir():
        found += sorted(map(str, versions.glob(f"{version}.*/bin/python")))
    for each in filter(None, found):
        done = subprocess.run(
            [each, "-c", "import ensurepip, venv"], capture_output=True, timeout=60
        )
        if not done.returncode:  # a shim of pyenv may lead nowhere
            return each
    return None


def environment(python, torch):
    """Make the environment of a row, and return its interpreter."""
    folder = ROOT / ".matrix" / f"python{python}-torch{torch}"
    inside = folder / "bin" / "python"
    subprocess.run([interpreter(python), "-m", "venv", folder], check=True, timeout=_INSTALL_S)
    wanted = "torch" if torch == "newest" else f"torch=={torch}.*"
    # With the versions that are tested where their torch is, and else with the newest of all.
    pins = ["--constraint", str(ROOT / "constraints.txt")] if torch == "2.13" else ["--upgrade"]
    command = [inside, "-m", "pip", "install", "--quiet", *pins, wanted, "--editable", ".[test]"]
    subprocess.run(command, check=True, cwd=ROOT, timeout=_INSTALL_S)
    return inside


def found_by(python, torch):
    """Run the selection, and return the row and the names of the tests that failed."""
    inside = environment(python, torch)
    code = (
        "import platform, numpy, torch; print(platform.python_version(), torch.__version__, "
        "numpy.__version__)"
    )
    versions = subprocess.check_output([inside, "-c", code], text=True, timeout=300).split()
    began = time.monotonic()
    command = [inside, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", *QUICK]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_TESTS_S)
    last = done.stdout.strip().rpartition("\n")[2]
    counts = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    if not counts.get("passed"):
        raise SystemExit(f"{python}, torch {torch}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    names = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    row = Row(
        *(version.partition("+")[0] for version in versions),  # without what it was built for
        counts["passed"],
        counts.get("failed", 0) + counts.get("error", 0),
        counts.get("skipped", 0),
        round(time.monotonic() - began),
    )
    return row, names


def written_into(text, row):
    """The text of the page, with a row in the place of the one of the same versions."""
    before, rest = text.split(BEGIN)
    table, after = rest.split(END)
    rows = [line for line in table.splitlines(keepends=True)[2:] if line.strip()]
    same = [_minor(str(row)) == _minor(line) for line in rows]
    kept = [line for line, is_same in zip(rows, same, strict=True) if not is_same]
    in_order = sorted([*kept, str(row)], key=_minor)
    return f"{before}{BEGIN}{HEAD}{''.join(in_order)}{END}{after}"


def _minor(line):
    """The minor versions of torch and of Python in a row: each stands for one that is promised."""
    python, torch = (re.findall(r"\d+", each)[:2] for each in line.split("|")[1:3])
    return [int(n) for n in (*torch, *python)]


def main(words):
    """Run all rows, or those that have one of some words; return 1 if a test failed."""
    failed = False
    for python, torch in ROWS:
        if words and not {python, torch} & set(words):
            continue
        if interpreter(python) is None:
            print(f"there is no Python {python} on this machine; its row stays as it is")
            continue
        row, names = found_by(python, torch)
        PAGE.write_text(written_into(PAGE.read_text(), row))
        print(str(row).strip(), *names, sep="\n  ", flush=True)
        failed = failed or bool(names)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
