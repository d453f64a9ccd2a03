"""A line of JSON for each test as it begins and as it ends, also where the run is killed."""

import json


class Results:
    """A plugin of pytest; in the process that has the workers, if there are several."""

    def __init__(self, path):
        self.file = open(path, "a", buffering=1)  # noqa: SIM115 - open as long as the run

    def pytest_runtest_logstart(self, nodeid):
        self.file.write(json.dumps({"test": nodeid}) + "\n")

    def pytest_runtest_logreport(self, report):
        if report.when != "call" and report.outcome == "passed":
            return
        line = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
        if report.failed:
            line["text"] = str(report.longrepr)[-4000:]
        elif report.skipped:
            line["reason"] = reason_of(report.longrepr)
        self.file.write(json.dumps(line) + "\n")

    def pytest_unconfigure(self):
        self.file.close()


def reason_of(longrepr):
    """Why a test was skipped."""
    text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return text.removeprefix("Skipped: ")
