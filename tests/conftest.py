"""Every test must leave the process as it found it."""

import contextlib
import gc
import inspect
import os
import signal
import threading
import traceback
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest
import torch
from support.device import differs, references, standin
from support.durations import Durations, longest_first
from support.family import family
from support.forked import server as scripts
from support.golden import Golden, tell_renewed
from support.results import Results
from support.rights import why_lacking
from support.shaking import Shaking
from support.thinning import thinned_out
from support.ticking import Clock
from support.versions import other_than_tested
from support.wreckage import Wreckage

from pipedream_rt import Pipeline
from pipedream_rt.cluster import environment as environment_of_job
from pipedream_rt.cluster.forked_workers import fork_server

# How long an example takes says something of the machine alone.
hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("untimed")


def pytest_addoption(parser):
    parser.addoption(
        "--device",
        default="cpu",
        help="What pipelines compute on where a test does not say: `standin`, or an accelerator.",
    )
    parser.addoption("--results", help="A file for a line of JSON for each test that ends.")
    parser.addoption("--shake", metavar="SEED", help="Slow threads down at places that it draws.")
    parser.addoption("--renew", action="store_true", help="Write texts into golden/ that differ.")


def pytest_configure(config):
    """Other versions than those that are tested may warn of what these do not."""
    if other_than_tested():
        config.addinivalue_line("filterwarnings", "default")
    if (device := config.getoption("--device")) not in ("cpu", standin.NAME):
        os.environ[references.DEVICE] = device
    config.pluginmanager.register(Wreckage())
    if (seed := config.getoption("--shake")) is not None:
        shaking = Shaking(seed)
        shaking.install()
        config.pluginmanager.register(shaking)
    if hasattr(config, "workerinput"):
        return  # the process that has the workers is told of all tests
    config.pluginmanager.register(Durations())
    if path := config.getoption("--results"):
        config.pluginmanager.register(Results(path))


def pytest_report_header():
    if others := other_than_tested():
        return f"warnings are no errors, since here is other software than is tested: {others}"
    return None


def pytest_terminal_summary(terminalreporter):
    tell_renewed(terminalreporter)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what -m does not want
def pytest_collection_modifyitems(config, items):
    longest_first(items)
    tests = defaultdict(list)  # in the order of their parameters, alike in all processes
    for item in items:
        if item.get_closest_marker("thinned"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        every = cases[0].get_closest_marker("thinned").args[0]
        for place in thinned_out([case.callspec.params for case in cases], every):
            cases[place].add_marker(pytest.mark.stress)
    if lacking := why_lacking():
        for item in items:
            if item.get_closest_marker("rights"):
                item.add_marker(pytest.mark.skip(reason=lacking))
    if (device := config.getoption("--device")) != "cpu":
        for item in items:
            if (reason := differs.why(item.nodeid, device)) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish():
    """Let the collector of garbage pass by all that is imported: it takes 0.2 s for each look."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def seeds_without_their_stacks():
    """Let `torch.manual_seed` note no stacks: it formats three, for the GPUs that may come later.

    The references seed before each layer, and those stacks were half of their time.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module in (torch.cuda, torch.xpu, torch.mtia):
            patch.setattr(module, "traceback", SimpleNamespace(format_stack=list), raising=False)
        yield


@pytest.fixture(autouse=True, scope="session")
def device_of_the_suite(request):
    """Let pipelines compute on another device than the CPU where a test does not say.

    On the stand-in every report of its check is an error: see `support/device`.
    """
    name = request.config.getoption("--device")
    if name == "cpu":
        yield
        return
    inspect.unwrap(Pipeline.__init__).__kwdefaults__["devices"] = name
    if name != standin.NAME:  # else two runs of one plain loop would differ, as of a convolution
        torch.use_deterministic_algorithms(True, warn_only=True)
    yield


def children() -> set[int]:
    """Process ids of all children of this process, zombies included."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found.update(map(int, (task / "children").read_text().split()))
        except OSError:
            continue  # the thread has ended meanwhile
    return found


def end(pids: set[int]) -> None:
    """Kill children of this process with all that they have started, and reap them."""
    for pid in [each for child in pids for each in family(child)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def own_children() -> set[int]:
    """Those of them that a test may have left behind, and scripts, which others have forked.

    What forks workers ends with this process, and what forks scripts does with the session.
    """
    return children() - {fork_server().pid, scripts.pid} | scripts.running()


def stack_of(thread: threading.Thread) -> str:
    import sys

    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame else "(ended)"


@pytest.fixture(autouse=True, scope="session")
def signals_as_in_a_terminal():
    """Let programs that tests start react to Ctrl-C, also where the shell ignores it.

    What is ignored is inherited; what has a handler is as it was at first in a program that starts.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def no_more_scripts():
    """End what forks scripts once nobody wants one."""
    yield
    scripts.close()


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Fail a test that leaks a thread or a child process, and say where the thread is."""
    torch.set_num_threads(1)
    threads_before, children_before = set(threading.enumerate()), own_children()
    yield
    # transformers lets the threads go that have read a checkpoint, and the exporter of Prometheus
    # those that have answered; neither waits for their end.
    for thread in set(threading.enumerate()) - threads_before:
        if "ThreadPoolExecutor-" in thread.name or "process_request" in thread.name:  # not ours
            thread.join(20)
    leaked = [t for t in threading.enumerate() if t not in threads_before and t.is_alive()]
    # A pipeline's threads are joined by close; only the thread that pytest-timeout owns may come.
    leaked = [
        t for t in leaked if "timeout" not in t.name.lower() and not t.name.startswith("pytest")
    ]
    left = own_children() - children_before
    end(left)  # else they would disturb the tests that follow
    assert not leaked, "leaked threads:\n" + "\n".join(f"{t.name}\n{stack_of(t)}" for t in leaked)
    assert not left, f"leaked processes of {os.getpid()}: {left}"


@pytest.fixture(autouse=True)
def handlers_as_before():
    """Give signals the handlers back that they had: Ctrl-C of another test would be lost."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1, signal.SIGALRM)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def no_secret_of_another_test():
    """Forget the secret that a test has had in its environment."""
    yield
    environment_of_job._taken.clear()


@pytest.fixture
def environment(monkeypatch):
    """No variable of an outer launcher decides where the stages run; workers know a secret."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "PIPEDREAM_RT_LISTEN_FD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIPEDREAM_RT_SECRET", "7f3" + "0" * 61)


@pytest.fixture
def golden(request):
    """Compares texts with the files of `golden/` beside the test; see `support.golden`."""
    folder, renew = request.path.parent / "golden", request.config.getoption("--renew")
    return Golden(folder, renew, request.node.user_properties)


@pytest.fixture
def clock(monkeypatch):
    """Let the profiler take its time from layers that move a clock; see `support.ticking`."""
    import pipedream_rt.planning.meter

    monkeypatch.setattr(pipedream_rt.planning.meter, "time", Clock)
    monkeypatch.setattr(pipedream_rt.planning.profiling, "_process_bytes", lambda: 1e6)


@pytest.fixture
def three_cores(monkeypatch):
    """Let this process have three cores, wherever it runs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
