"""What a test that fails leaves in memory goes before the next one begins.

The traceback of its error holds the variables of all its functions: sockets, pipelines, threads'
pools. The next test would close them as its garbage, and fail with their warnings.
"""

import contextlib
import gc
import sys
import warnings

import pytest

FAILED = pytest.StashKey[bool]()


class Wreckage:
    """A plugin of pytest that lets go what a failed test refers to."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item):
        report = yield
        if report.failed:
            item.stash[FAILED] = True
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item):
        if item.stash.get(FAILED, False):
            clear()  # as where a test returns, whose variables go before its fixtures do
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        try:
            return (yield)
        finally:
            if item.stash.get(FAILED, False):
                clear()


def clear():
    """Forget the last error, and collect garbage without a warning: the test is known to fail."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        with contextlib.suppress(AttributeError):
            delattr(sys, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
