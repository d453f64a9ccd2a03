"""Whether the packages here are those that are tested."""

from importlib import metadata
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


def other_than_tested():
    """The packages here whose versions are others than those of ``constraints.txt``."""
    found = []
    for line in CONSTRAINTS.read_text().splitlines():
        name, equal, version = line.partition(";")[0].strip().partition("==")
        if not equal:
            continue
        try:
            here = metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
        if here != version:
            found.append(f"{name} {here}")
    return found
