"""The processes below a process; programs that are no tests use it too."""

from pathlib import Path


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [each for child in task.read_text().split() for each in family(int(child))]
        except OSError:
            continue  # it has ended meanwhile
    return found
