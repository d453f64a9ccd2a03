"""Tests that are marked ``standin`` run in a process of their own; see `support.device.aside`."""

import pytest
from support.device import aside, standin


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if aside.is_for_aside(item):
        aside.start(item)  # before the fixtures that look for what a test leaves behind


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if not aside.is_for_aside(pyfuncitem):
        return None
    aside.report(pyfuncitem)
    return True


def pytest_runtest_logstart(nodeid, location):
    aside.note(test=nodeid)


def pytest_runtest_logreport(report):
    if report.outcome != "passed":
        skipped = report.outcome == "skipped" and isinstance(report.longrepr, tuple)
        text = report.longrepr[2] if skipped else report.longreprtext
        aside.note(test=report.nodeid, outcome=report.outcome, text=text)


def pytest_runtest_logfinish(nodeid, location):
    aside.note(test=nodeid, over=True)


@pytest.fixture(autouse=True)
def nothing_reported():
    """A test that leaves a report of the stand-in's check has failed."""
    yield
    if aside.is_aside():
        assert standin.violations() == []
