"""The command ``plan``, as a user types it, on profiles that were made once."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pipedream_rt.planning import files
from pipedream_rt.planning.profile import LayerCosts, Profile

PROFILES = Path(__file__).parent.parent / "planning" / "profiles"
CLASSIFIER = PROFILES / "classifier.json"


@pytest.fixture
def plan_of(call):
    """Plan, and read the best plan."""
    return lambda *words: json.loads(call("plan", *words, "--json"))[0]


def test_it_prints_the_choices_and_the_best_plan(call, golden):
    servers = ("--workers", "2x2", "--bandwidth", "80Gbit,10Gbit")
    golden("plan-explained", call("plan", CLASSIFIER, *servers, "--explain"))


def test_memory_and_speed_of_each_worker_count(plan_of):
    words = (CLASSIFIER, "--workers", "2", "--max-replicas", "1", "--schedule", "async-1f1b")
    alike, uneven = plan_of(*words), plan_of(*words, "--speed", "2,1", "--memory", "4GiB,8GiB")
    before, after = (len(found["stages"][0]["layers"]) for found in (alike, uneven))
    assert before < after
    assert uneven["memory"] <= 8 * 2**30


def test_micro_batches_slowdown_and_copies_are_taken(plan_of):
    words = (CLASSIFIER, "--workers", "3", "--max-replicas", "1", "--schedule", "async-1f1b")
    words = (*words, "--micro-batches", "1")
    found = plan_of(*words, "--slowdown", "0:1,1:1.1", "--copies", "2")
    assert found["per_update"] == 1
    assert found["slowdown"] == pytest.approx(1 + 0.1 * found["staleness"])
    assert found["memory"] > plan_of(*words)["memory"]


def test_branches_can_be_kept_in_order(call):
    path = PROFILES / "branches.json"
    assert "cut at 16 places" in call("plan", path, "--order", "branches")
    assert "cut at 12 places" in call("plan", path)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["no such file"], 1, "cannot be read"),
        ([CLASSIFIER, "--workers", "0"], 2, "give a number, or 4x2"),
        ([CLASSIFIER, "--workers", "65"], 1, "from 1 to 64 workers"),
        ([CLASSIFIER, "--workers", "2x2x2"], 1, "at most two levels"),
        ([CLASSIFIER, "--bandwidth", "0"], 1, "bandwidth must be above 0"),
        ([CLASSIFIER, "--bandwidth", "1Gbit,2Gbit"], 1, "--bandwidth has 2 values"),
        ([CLASSIFIER, "--memory", "1kB"], 1, "no plan fits: the best one needs"),
        (
            [CLASSIFIER, "--memory", "1GB,2GB"],
            1,
            "--memory has 2 values; give one, or one for each",
        ),
        ([CLASSIFIER, "--speed", "-1"], 1, "speed of a worker must be above 0"),
        (
            [CLASSIFIER, "--slowdown", "much"],
            2,
            "give corrected, plain, none, or two or more points",
        ),
        ([CLASSIFIER, "--slowdown", "1:1,0:1"], 2, "two or more points"),
        ([CLASSIFIER, "--slowdown=-1:2,0:1"], 2, "two or more points"),
        ([CLASSIFIER, "--speed", "x"], 2, "'x' is no number"),
        ([CLASSIFIER, "--copies", "nan"], 1, "copies must be a number of at least 0"),
        ([CLASSIFIER, "--workers", "9" * 5000], 2, "give a number, or 4x2"),
        ([CLASSIFIER, "--codec", "much"], 2, "codec"),
        ([CLASSIFIER, "--codec", "0.3,soon"], 2, "codec"),
        ([CLASSIFIER, "--codec", "2"], 2, "codec"),
        ([CLASSIFIER, "--codec", "0"], 2, "codec"),
        ([CLASSIFIER, "--svg", "/"], 2, "'/' is a directory"),
    ],
)
def test_what_makes_no_sense_is_refused(call, words, code, message):
    assert message in call("plan", *words, code=code)


def test_as_many_workers_as_there_may_be_are_explained(call):
    output = call("plan", CLASSIFIER, "--workers", "64", "--explain", "--max-replicas", "1")
    assert "a worker less" in output
    assert "a worker more" not in output


def test_layers_that_take_no_time_are_planned(call, tmp_path):
    """And their names write nothing into the terminal."""
    path = tmp_path / "x.profile"
    layers = tuple(LayerCosts(name=f"\x1b{i}", forward=0.0) for i in range(3))
    files.save(Profile(layers=layers), path)
    assert "\x1b" not in call("plan", path, "--explain")


def test_a_link_whose_latency_is_longer_than_the_work_is_not_used_for_gradients(plan_of):
    words = (CLASSIFIER, "--workers", "4", "--schedule", "data-parallel")
    assert plan_of(*words, "--bandwidth", "1000Gbit")["workers"] == 4
    assert plan_of(*words, "--latency", "1s")["workers"] == 1


def test_fewer_layers_than_workers_leave_workers_idle(plan_of, tmp_path):
    path = tmp_path / "x.profile"
    files.save(Profile(layers=(LayerCosts(name="only", forward=1.0),)), path)
    assert plan_of(path, "--workers", "4", "--max-replicas", "1")["workers"] == 1


def test_a_picture_of_the_best_plan(call, plan_of, tmp_path):
    picture = tmp_path / "plan.svg"
    words = (CLASSIFIER, "--workers", "4", "--schedule", "async-1f1b")
    call("plan", *words, "--svg", picture)
    text = "".join(ElementTree.parse(picture).getroot().itertext())
    assert "async-1f1b" in text
    for number, stage in enumerate(plan_of(*words)["stages"]):
        for replica in range(len(stage["workers"])):
            several = len(stage["workers"]) > 1
            assert f"stage {number}" + f", replica {replica}" * several in text


def test_a_codec_for_the_slow_link(call, plan_of):
    words = (CLASSIFIER, "--workers", "4", "--bandwidth", "1Gbit", "--max-replicas", "1")
    words = (*words, "--schedule", "async-1f1b")
    plain, coded = plan_of(*words), plan_of(*words, "--codec", "0.27,1ms")
    assert coded["throughput"] > plain["throughput"]
    assert any(stage["coded"] for stage in coded["stages"])
    assert "the codec pays, as Layout(codecs={(" in call("plan", *words, "--codec", "0.27")
