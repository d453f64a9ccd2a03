"""How workers end, and who starts them again: one table for all starters."""

import configparser
import signal
from pathlib import Path

import pytest

from pipedream_rt.cluster.worker_life import (
    Starter,
    WorkerEnd,
    in_words,
    is_final,
    is_of_its_own,
    is_started_again,
    outward,
    shell_code,
)

WORKERS = Path(__file__).resolve().parents[2] / "workers"
KILLED, TERMINATED, CRASHED = (
    128 + each for each in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV)
)

TABLE = [
    # end, by: SCRIPT, PERSIST, FORKED, NODE, ENGINE, SYSTEMD, KUBERNETES
    (WorkerEnd.DONE, 1, 1, 1, 0, 0, 0, 0),
    (WorkerEnd.FAILED, 1, 0, 0, 0, 0, 0, 1),
    (WorkerEnd.WRONG_COMMAND, 1, 0, 0, 0, 0, 0, 1),
    (WorkerEnd.COORDINATOR_LOST, 1, 1, 1, 0, 1, 1, 1),
    (WorkerEnd.AGAIN, 1, 1, 1, 0, 0, 1, 1),
    (WorkerEnd.OVER, 1, 0, 0, 0, 0, 1, 1),
    (WorkerEnd.UNREACHED, 1, 0, 0, 0, 0, 1, 1),
    (WorkerEnd.UNKNOWN, 1, 0, 0, 1, 1, 1, 1),
    (7, 1, 0, 0, 1, 0, 1, 1),
    (KILLED, 1, 0, 0, 1, 1, 1, 1),
    (TERMINATED, 1, 0, 0, 1, 1, 1, 1),
    (CRASHED, 1, 0, 0, 1, 1, 1, 1),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: int(row[0]))
def test_who_starts_what_again(row):
    code, *expected = row
    assert [int(is_started_again(starter, code)) for starter in Starter] == expected


def test_a_final_end_is_one_that_an_engine_leaves():
    assert [code for code, *_ in TABLE if is_final(code)] == [
        code for code, *_ in TABLE if not is_started_again(Starter.ENGINE, code)
    ]


def test_the_unit_of_systemd_says_the_same():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(WORKERS / "pipedream-rt@.service")
    service = unit["Service"]
    assert service["Restart"] == "on-failure"  # any end but 0, and a signal that asks to end
    left = {0, *map(int, service["RestartPreventExitStatus"].split())}
    for code, *_ in TABLE:
        assert is_started_again(Starter.SYSTEMD, code) == (code not in left)


@pytest.mark.parametrize("name", ["trainjob.yaml", "jobset.yaml"])
def test_the_manifests_of_kubernetes_say_the_same(name):
    lines = (WORKERS / name).read_text().splitlines()
    policies = {line.split(":")[1].strip() for line in lines if "restartPolicy:" in line}
    assert policies == {"OnFailure"}  # any end but 0
    assert all(is_started_again(Starter.KUBERNETES, c) == (c != 0) for c, *_ in TABLE)


def test_what_stays_between_two_processes_does_not_leave_them():
    assert outward(WorkerEnd.AGAIN) == WorkerEnd.COORDINATOR_LOST
    assert [outward(code) for code in (0, 1, 3, 143)] == [0, 1, 3, 143]
    assert type(outward(WorkerEnd.AGAIN) + 0) is int


def test_codes_as_a_shell_has_them_and_in_words():
    assert (shell_code(-9), shell_code(3)) == (137, 3)
    assert in_words(-11) == "killed by SIGSEGV"
    assert in_words(7) == "exit code 7"
    assert in_words(WorkerEnd.UNKNOWN).startswith("the process that forked it")


@pytest.mark.parametrize(("code", "own"), [
    (-11, True), (-6, True), (-9, False), (-15, False), (7, True), (1, True),
    (WorkerEnd.COORDINATOR_LOST, False), (WorkerEnd.AGAIN, False), (WorkerEnd.UNKNOWN, False),
])  # fmt: skip
def test_which_ends_are_of_what_a_worker_computes(code, own):
    assert is_of_its_own(in_words(code)) is own
