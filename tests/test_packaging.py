"""What is said of versions is the same everywhere, and a source distribution has everything."""

import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import matrix
from support.deadlines import LATEST_S

from pipedream_rt import torch_private

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"benchmarks", "docs", "examples", "tests", "workers"}
FILES = {
    "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile", "constraints.txt", "mkdocs.yml",
}  # fmt: skip


@pytest.fixture
def setup():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def rows():
    table = matrix.PAGE.read_text().split(matrix.BEGIN)[1].split(matrix.END)[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_the_floor_of_torch_is_one(setup):
    floor = matrix.ROWS[0][1]
    assert f"torch>={floor}" in setup["options"]["install_requires"].split("\n")
    assert floor == torch_private.OLDEST
    assert rows()[0][1].startswith(f"{floor}.")
    assert rows()[-1][1].startswith(f"{torch_private.NEWEST}.")


def test_every_python_that_is_promised_is_tried(setup):
    promised = re.findall(r"Python :: (3\.\d+)", setup["metadata"]["classifiers"])
    assert promised == sorted({python for python, _ in matrix.ROWS}, key=lambda v: int(v[2:]))
    tried = {".".join(row[0].split(".")[:2]) for row in rows()}
    assert tried == set(promised)
    assert setup["options"]["python_requires"] == f">={promised[0]}"


def test_a_row_takes_the_place_of_the_one_before():
    page = f"words\n{matrix.BEGIN}{matrix.HEAD}{matrix.END}more\n"
    first = matrix.Row("3.11.7", "2.13.0", "2.4.6", 10, 1, 0, 7)
    page = matrix.written_into(page, first)
    page = matrix.written_into(page, first._replace(torch="2.9.1"))
    page = matrix.written_into(page, first._replace(failed=0))
    assert page == (
        f"words\n{matrix.BEGIN}{matrix.HEAD}"
        "| 3.11.7 | 2.9.1 | 2.4.6 | 10 | 1 | 0 | 7 |\n"
        "| 3.11.7 | 2.13.0 | 2.4.6 | 10 | 0 | 0 | 7 |\n"
        f"{matrix.END}more\n"
    )


def test_a_source_distribution_has_what_the_tests_need():
    """Beside the packages, the licence and what setuptools adds by itself."""
    said = (ROOT / "MANIFEST.in").read_text().splitlines()
    grafted = {line.split()[1] for line in said if line.startswith("graft ")}
    included = {name for line in said if line.startswith("include ") for name in line.split()[1:]}
    assert grafted == FOLDERS
    assert included == FILES
    for name in (*FOLDERS, *FILES):
        assert (ROOT / name).exists()
    by_themselves = {
        "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.cfg", "pipedream_rt",
        "workers",
    }  # fmt: skip
    made = {"build", "dist", "out", "site"}
    there = {
        path.name
        for path in ROOT.iterdir()
        if not path.name.startswith(".") and path.suffix not in (".egg-info", ".whl")
    }
    assert there - made <= FOLDERS | FILES | by_themselves


def test_the_package_runs_as_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "pipedream_rt", "--version"], capture_output=True, text=True,
        timeout=LATEST_S, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("python -m pipedream_rt, version ")
