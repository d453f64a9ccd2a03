"""``make gpu``: what an accelerator does, on a machine that has torch and nothing of this project.

It says what is missing, installs wheels into a folder of its own, and runs ``python -m benchmarks``
with NAME, `gpu` or `devices`. It needs nothing but the standard library itself.
"""

from __future__ import annotations

import argparse
import configparser
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def missing() -> list[str]:
    """The requirements of the package and of its tests that this interpreter does not meet."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    wanted = [config["options"]["install_requires"], config["options.extras_require"]["test"]]
    found = []
    for line in "\n".join(wanted).splitlines():
        if not line or line.startswith("#"):
            continue
        name, least = re.fullmatch(r"([\w-]+)(?:>=([\d.]+))?", line.strip()).groups()  # type: ignore[union-attr]
        try:
            there = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{line} is not installed")
            continue
        if least and _number(there) < _number(least):
            found.append(f"{line} is needed, and {there} is installed")
    return found


def _number(version: str) -> tuple[int, ...]:
    """The release of a version, as (2, 11) of 2.11.0+cu130."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def install(wheels: Path, site: str) -> None:
    """Install wheels into a folder, from nowhere else."""
    files = sorted(map(str, wheels.glob("*.whl")))
    if not files:
        sys.exit(f"there is no wheel in {wheels}")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    if subprocess.run([*command, "--target", site, *files]).returncode:
        sys.exit(f"the wheels of {wheels} are not for {sys.executable}; see above")
    sys.path.insert(0, site)


def main() -> int:
    """Prepare and measure; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=("gpu", "devices"))
    parser.add_argument("--wheels", type=Path, help="a folder of wheels of what is missing")
    parser.add_argument("--device", help="another device than the accelerator that torch has")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as site:
        if given.wheels is not None:
            install(given.wheels, site)
        if lacking := missing():
            print("This machine lacks:", *lacking, sep="\n  ")
            names = " ".join(each.split()[0] for each in lacking)
            print(
                "Where there is a network, get wheels for this Python and what they need in turn:"
                f"\n  pip download --only-binary=:all: --dest wheels {names}"
                "\nand say WHEELS=wheels."
            )
            return 1
        path = [site, str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if given.device:
            # Apart from what is measured, which would not be measured again.
            environment.setdefault("OUT", str(ROOT / "build" / given.device))
            environment["BENCHMARK_DEVICE"] = given.device
        if given.device == "standin":
            path.insert(0, str(ROOT / "tests/support/device/autoload"))
        environment["PYTHONPATH"] = os.pathsep.join(path)
        command = [sys.executable, "-m", "benchmarks", given.name]
        return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
