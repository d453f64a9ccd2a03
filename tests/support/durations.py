"""How long each file of tests takes: the longest begin first, and who takes too long is told.

`pytest -n 2 --dist loadfile` gives files to processes in the order of collection, so a long one
that came last would keep one process waiting for the other.
"""

from collections import Counter

SECONDS = {
}  # fmt: skip
"""By file, its seconds on two quiet cores beside another file; those above `SHORT`."""

SHORT = 10
SLOWEST = 20


def longest_first(items):
    """Sort tests by the time of their file; those of a file stay in their order."""
    items.sort(key=lambda item: -SECONDS.get(file_of(item.nodeid), SHORT))


def file_of(nodeid):
    return nodeid.partition("::")[0]


class Durations:
    """A plugin of pytest that tells the slowest files, and those that take twice their time."""

    def __init__(self):
        self.seconds = Counter()

    def pytest_runtest_logreport(self, report):
        self.seconds[file_of(report.nodeid)] += report.duration

    def pytest_terminal_summary(self, terminalreporter):
        if len(self.seconds) < SLOWEST:
            return
        terminalreporter.section("slowest files")
        for file, seconds in self.seconds.most_common(SLOWEST):
            terminalreporter.write_line(f"{seconds:7.1f} s  {file}")
        for file, seconds in sorted(self.seconds.items()):
            if seconds > (most := 2 * SECONDS.get(file, SHORT)):
                terminalreporter.write_line(
                    f"{file} took {seconds:.0f} s, and may take {most}: this machine is busy, or "
                    "it needs a look (tests/support/durations.py)"
                )
