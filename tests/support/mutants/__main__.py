"""Seeds faults into the library, one at a time, and tells which the tests notice.

    make mutants                                      all rooms, what is not known yet
    python -m support.mutants entered                 which test enters which function (once)
    python -m support.mutants run [--room cluster]    a line of JSON for each fault
    python -m support.mutants again                   the faults that were found, with these tests
    python -m support.mutants table                   the table of docs/design/mutants.md

A fault is tried with the tests that enter its function, the quickest first, until one fails. Trees
of their own, one for each of two runs, are made of the files that git knows here.
"""

import atexit
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import click
import pytest
import torch  # noqa: F401 - imported once, for all that are forked

from benchmarks.grid import RESULTS, keep, lines_of
from support.durations import SECONDS, SHORT
from support.mutants.faults import chosen, faults_of, with_fault

ROOT = Path(__file__).resolve().parents[3]
KNOWN = RESULTS / "mutants.jsonl"
ENTERED = ROOT / ".mutants" / "entered.jsonl"
PAGE = ROOT / "docs" / "design" / "mutants.md"
BEGIN, END = "<!-- what make mutants has found: begin -->\n", "<!-- end -->\n"

ROOMS = {
    "schedules": 40, "stage": 50, "messages": 30, "checkpoint": 30, "coordinator": 60,
    "cluster": 70, "transport": 40, "job": 30, "models": 40, "batches": 20,
}  # fmt: skip
"""The rooms, and how many faults of each are tried."""

TESTS = [
    *ROOMS, "devices/test_pipelines.py", "properties", "serial", "corrections", "optimizers",
    "verify", "test_pipeline.py", "test_schema.py", "test_lifecycle.py", "cli/test_run.py",
]  # fmt: skip
"""What may notice a fault: the tests of the rooms, and the quick selection of all others."""

SLOTS = 2
FIRST_S, ALL_S = 10, 120
"""Seconds of tests, as they took without a fault: of the first look, and of all."""


class Slot:
    """A tree of its own, in which one run of the tests goes on at a time."""

    def __init__(self, folder, number):
        self.tree, self.temporary = folder / f"tree{number}", folder / f"t{number}"
        self.temporary.mkdir()
        names = subprocess.check_output(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT
        )
        for name in filter(None, names.decode().split("\0")):
            if (ROOT / name).is_file():
                target = self.tree / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, target)
        self.changes = int(time.time())
        self.mark = f"{os.getpid()}-{number}"  # in the environment of all that it starts
        self.pid = self.watch = None

    def write(self, path, text):
        """Change a file; no bytecode of another text may be taken for its own."""
        self.changes += 2
        (self.tree / path).write_text(text)
        os.utime(self.tree / path, (self.changes, self.changes))

    def start(self, tests, entered=None):
        """Run tests, in this order, until one fails; with `entered`, all of them."""
        self.results = self.temporary / "results.jsonl"
        self.results.unlink(missing_ok=True)
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        plugins = [InOrder(tests)] if entered is None else [Now(entered)]
        words = [*files, "-q", "-p", "no:cacheprovider", "-m", "not stress and not rights",
                 f"--results={self.results}", f"--basetemp={self.temporary}/b",
                 *(["-x"] if entered is None else [])]  # fmt: skip
        self.pid = os.fork()
        if not self.pid:
            self._run(words, plugins, entered)
        self.watch = os.pidfd_open(self.pid)
        self.begun = time.monotonic()

    def _run(self, words, plugins, entered):
        code = 70
        try:
            os.setsid()
            output = os.open(self.temporary / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(self.tree)
            ours = [str(self.tree), str(self.tree / "tests")]
            if entered is not None:
                ours.insert(0, str(self.tree / "tests/support/mutants/hook"))
                os.environ |= {"MUTANTS_ENTERED": str(entered), "MUTANTS_ROOT": f"{self.tree}/"}
            os.environ |= {
                "PYTHONPATH": os.pathsep.join(ours), "TMPDIR": str(self.temporary),
                "MUTANTS_SLOT": self.mark,
            }  # fmt: skip
            tempfile.tempdir = None
            theirs = [p for p in sys.path if p not in ("", str(ROOT), str(ROOT / "tests"))]
            sys.path[:] = [*ours, *theirs]
            for name in [n for n in sys.modules if n.partition(".")[0] == "support"]:
                del sys.modules[name]
            if entered is not None:
                sys.modules.pop("sitecustomize", None)
                import sitecustomize  # noqa: F401
            code = int(pytest.main(words, plugins=plugins))
            atexit._run_exitfuncs()
        finally:
            os._exit(code)

    def left_s(self, limit_s):
        return self.begun + limit_s - time.monotonic()

    def end(self):
        """Reap the run, or kill it; end what it has left. Return its code, None if killed."""
        code = None
        if select.select([self.watch], [], [], 0)[0]:
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        else:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.watch)
        mark = f"MUTANTS_SLOT={self.mark}".encode()
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), signal.SIGKILL)
            except OSError:
                continue  # it has ended, or is another user's
        shutil.rmtree(self.temporary / "b", ignore_errors=True)
        return code


class InOrder:
    """Lets pytest run these tests alone, in their order."""

    def __init__(self, tests):
        self.places = {test: place for place, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items[:] = sorted(
            (item for item in items if item.nodeid in self.places),
            key=lambda item: self.places[item.nodeid],
        )


class Now:
    """Says which test runs now, and has all that it enters noted as new."""

    def __init__(self, folder):
        self.folder, self.count = folder, 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid):
        import sitecustomize

        self.count += 1
        (self.folder / f"{self.count}.name").write_text(nodeid)
        (self.folder / "now").write_text(str(self.count))
        sitecustomize.seen.clear()


class Test(NamedTuple):
    """A test that passed without a fault: its seconds, and the functions that it entered."""

    name: str
    seconds: float
    entered: frozenset


@click.group()
def main():
    """Seed faults, and see which the tests notice."""


@main.command()
@click.argument("tests", nargs=-1)
def entered(tests):
    """Run TESTS (folders and files of tests/; all by default) once, and note what each enters."""
    files = []
    for name in tests or TESTS:
        place = ROOT / "tests" / name
        files += sorted(place.rglob("test_*.py")) if place.is_dir() else [place]
    names = [str(file.relative_to(ROOT)) for file in dict.fromkeys(files)]
    names.sort(key=lambda name: -SECONDS.get(name, SHORT))
    known = {line["name"].partition("::")[0] for line in lines_of(ENTERED)}
    waiting = [name for name in names if name not in known]
    with _slots() as slots:

        def work(slot):
            while waiting:
                file, folder = waiting.pop(0), slot.temporary / "entered"
                folder.mkdir()
                (folder / "now").write_text("0")
                slot.start([file], folder)
                yield 3600
                slot.end()
                for test in _noted(slot, folder):
                    keep(ENTERED, test._asdict() | {"entered": sorted(test.entered)})
                shutil.rmtree(folder)
                click.echo(f"{file}: {time.monotonic() - slot.begun:.0f} s")

        _together(slots, work)


def _noted(slot, folder):
    """The tests of a run that passed."""
    passed = {}
    for result in lines_of(slot.results):
        if result.get("outcome") in ("failed", "skipped"):
            passed[result["test"]] = None
        elif result.get("outcome") == "passed":
            passed.setdefault(result["test"], result["seconds"])
    for name in folder.glob("*.name"):
        test, functions = name.read_text(), name.with_suffix("")
        if passed.get(test) is not None and functions.exists():
            yield Test(test, passed[test], frozenset(functions.read_text().split()))


@main.command()
@click.option("--room", "rooms", multiple=True, help="Of these rooms alone.")
@click.option("--count", type=int, help="So many of each room.")
@click.option("--out", type=click.Path(path_type=Path), default=KNOWN)
def run(rooms, count, out):
    """Try the faults that nobody has tried, and add a line for each."""
    known = {line["key"] for line in lines_of(out)}
    waiting = []
    for room in rooms or ROOMS:
        found = {}
        for file in sorted((ROOT / "pipedream_rt" / room).rglob("*.py")):
            path = str(file.relative_to(ROOT))
            found |= faults_of(path, file.read_text())
        taken = chosen(found, count or ROOMS[room])
        waiting += [(room, fault, found[fault], ()) for fault in taken if fault.key not in known]
    _try(waiting, out)


@main.command()
@click.option("--known", type=click.Path(path_type=Path), default=KNOWN)
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--room", "rooms", multiple=True, help="Of these rooms alone.")
def again(known, out, rooms):
    """Try the faults that were found once more: first with the test that found them."""
    done, waiting = {line["key"] for line in lines_of(out)}, []
    for line in lines_of(known):
        if not line["found"] or line["key"] in done or (rooms and line["room"] not in rooms):
            continue
        file = ROOT / line["path"]
        found = faults_of(line["path"], file.read_text()) if file.exists() else {}
        for fault, place in found.items():
            if fault.key == line["key"]:
                waiting.append((line["room"], fault, place, (line["found"],)))
    _try(waiting, out)


def _try(waiting, out):
    """Try faults, and write a line for each: by which test it was found, or None."""
    tests = [
        Test(line["name"], line["seconds"], frozenset(line["entered"]))
        for line in lines_of(ENTERED)
    ]
    by_name = {test.name: test for test in tests}
    count = len(waiting)
    with _slots() as slots:

        def work(slot):
            while waiting:
                room, fault, place, before = waiting.pop(0)
                source = (ROOT / fault.path).read_text()
                entry = f"{fault.path}:{fault.entry}"
                candidates = sorted(
                    (test for test in tests if entry in test.entered),
                    key=lambda test: (_nearness(test.name, fault.path, room), test.seconds),
                )
                looks, taken = [[by_name[t] for t in before if t in by_name], [], []], 0.0
                for test in candidates:
                    taken += test.seconds
                    if taken <= ALL_S:
                        looks[1 if taken <= FIRST_S else 2].append(test)
                found, tried, begun = None, 0, time.monotonic()
                slot.write(fault.path, with_fault(source, place, fault))
                for look in filter(None, looks):
                    tried += len(look)
                    slot.start([test.name for test in look])
                    yield 60 + 5 * sum(test.seconds for test in look)
                    code = slot.end()
                    if code:
                        found = _failed(slot) or "nothing starts"
                    elif code is None:
                        found = "hangs"
                    if found:
                        break
                slot.write(fault.path, source)
                line = {
                    "key": fault.key, "room": room, "path": fault.path, "line": fault.line,
                    "function": fault.function, "kind": fault.kind, "before": fault.before,
                    "after": fault.after, "found": found, "by": _by(found, fault.path, room),
                    "entered": len(candidates), "tried": tried,
                    "seconds": round(time.monotonic() - begun, 1),
                }  # fmt: skip
                keep(out, line)
                place = f"{fault.path}:{fault.line}"
                click.echo(f"{count - len(waiting)}/{count} {place} {fault.kind}: {found}")

        _together(slots, work)


def _failed(slot):
    """The first test that failed."""
    failed = (r["test"] for r in lines_of(slot.results) if r.get("outcome") == "failed")
    return next(failed, None)


def _nearness(test, path, room):
    """Where a test stands: 0 in the file of the module's name, 1 in its room, 2 elsewhere."""
    file = test.partition("::")[0]
    if Path(file).name == f"test_{Path(path).stem}.py":
        return 0
    return 1 if file.startswith(f"tests/{room}/") else 2


BY = ("its own file", "its room", "elsewhere")


def _by(found, path, room):
    """Which kind of test found it."""
    if not found or "::" not in found:
        return found
    return BY[_nearness(found, path, room)]


class _slots:  # noqa: N801 - a context
    """The trees, which are gone at the end."""

    def __enter__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="mu"))
        return [Slot(self.folder, number) for number in range(SLOTS)]

    def __exit__(self, *_):
        shutil.rmtree(self.folder, ignore_errors=True)


def _together(slots, work):
    """Let each slot work: whenever it yields, its run may take so many seconds."""
    going = {}
    for slot in slots:
        _step(going, slot, work(slot))
    while going:
        left = min(slot.left_s(limit_s) for slot, (_, limit_s) in going.items())
        select.select([slot.watch for slot in going], [], [], max(0.0, left))
        for slot, (worker, limit_s) in list(going.items()):
            over = slot.left_s(limit_s) <= 0
            if over or select.select([slot.watch], [], [], 0)[0]:
                _step(going, slot, worker)


def _step(going, slot, worker):
    going.pop(slot, None)
    limit_s = next(worker, None)
    if limit_s is not None:
        going[slot] = worker, limit_s


@main.command()
def table():
    """Write the table into its page."""
    rooms, lines = defaultdict(Counter), lines_of(KNOWN)
    for line in lines:
        for room in (line["room"], "**all**"):
            rooms[room]["faults"] += 1
            by = line["by"] or ("no test" if line["entered"] else "never entered")
            rooms[room]["found" if line["found"] else "missed"] += 1
            rooms[room][by] += 1
    columns = ("faults", "found", *BY, "hangs", "nothing starts", "no test", "never entered")
    rows = [f"| room | {' | '.join(columns)} |", "|---" + "|--:" * len(columns) + "|"]
    for room in (*ROOMS, "**all**"):
        counts = rooms[room]
        rows.append(f"| {room} | {' | '.join(str(counts[c]) for c in columns)} |")
    text = PAGE.read_text()
    head, tail = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text(head + BEGIN + "\n".join(rows) + "\n" + END + tail)


if __name__ == "__main__":
    main()
