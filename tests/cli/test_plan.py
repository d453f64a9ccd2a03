import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipedream_rt.cli import main
from pipedream_rt.planning import files
from pipedream_rt.planning.profile import LayerCosts, Profile

PROFILES = Path(__file__).parent.parent / "planning" / "profiles"
CLASSIFIER = str(PROFILES / "classifier.json")


def run(*words):
    return CliRunner().invoke(main, ["plan", *words])


def plan_of(*words):
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_it_prints_the_choices_and_the_best_plan():
    result = run(CLASSIFIER, "--workers", "4x2", "--bandwidth", "80Gbit,10Gbit", "--explain")
    assert result.exit_code == 0, result.output
    for expected in ("11 layers", "data-parallel", "worth/s", "the bottleneck is", "twice the"):
        assert expected in result.output


def test_memory_and_speed_of_each_worker_count():
    alike = plan_of(CLASSIFIER, "--workers", "2", "--max-replicas", "1", "--schedule", "async-1f1b")
    uneven = plan_of(
        *(CLASSIFIER, "--workers", "2", "--max-replicas", "1", "--schedule", "async-1f1b"),
        *("--speed", "2,1", "--memory", "4GiB,8GiB"),
    )
    before, after = (len(found[0]["stages"][0]["layers"]) for found in (alike, uneven))
    assert before < after
    assert uneven[0]["memory"] <= 8 * 2**30


def test_micro_batches_slowdown_and_copies_are_taken():
    words = (CLASSIFIER, "--workers", "3", "--max-replicas", "1", "--schedule", "async-1f1b")
    found = plan_of(*words, "--micro-batches", "1", "--slowdown", "0:1,1:1.1", "--copies", "2")[0]
    assert found["per_update"] == 1
    assert found["slowdown"] == pytest.approx(1 + 0.1 * found["staleness"])
    assert found["memory"] > plan_of(*words, "--micro-batches", "1")[0]["memory"]


def test_branches_can_be_kept_in_order():
    path = str(PROFILES / "branches.json")
    assert "cut at 16 places" in run(path, "--order", "branches").output
    assert "cut at 12 places" in run(path).output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no such file"], "cannot be read"),
        ([CLASSIFIER, "--workers", "0"], "give a number, or 4x2"),
        ([CLASSIFIER, "--workers", "65"], "from 1 to 64 workers"),
        ([CLASSIFIER, "--workers", "2x2x2"], "at most two levels"),
        ([CLASSIFIER, "--bandwidth", "0"], "bandwidth must be above 0"),
        ([CLASSIFIER, "--bandwidth", "1Gbit,2Gbit"], "--bandwidth has 2 values"),
        ([CLASSIFIER, "--memory", "1kB"], "no plan fits: the best one needs"),
        ([CLASSIFIER, "--memory", "1GB,2GB"], "--memory has 2 values; give one, or one for each"),
        ([CLASSIFIER, "--speed", "-1"], "speed of a worker must be above 0"),
        ([CLASSIFIER, "--slowdown", "much"], "give corrected, plain, none, or two or more points"),
        ([CLASSIFIER, "--slowdown", "1:1,0:1"], "two or more points"),
        ([CLASSIFIER, "--slowdown=-1:2,0:1"], "two or more points"),
        ([CLASSIFIER, "--speed", "x"], "'x' is no number"),
        ([CLASSIFIER, "--copies", "nan"], "copies must be a number of at least 0"),
        ([CLASSIFIER, "--workers", "9" * 5000], "give a number, or 4x2"),
    ],
)
def test_what_makes_no_sense_is_refused(words, message):
    result = run(*words)
    assert result.exit_code != 0
    assert message in result.output


def test_as_many_workers_as_there_may_be_are_explained():
    result = run(CLASSIFIER, "--workers", "64", "--explain", "--max-replicas", "1")
    assert result.exit_code == 0, result.output
    assert "a worker more" not in result.output


def test_layers_that_take_no_time_are_planned(tmp_path):
    path = tmp_path / "x.profile"
    layers = tuple(LayerCosts(name=f"\x1b{i}", forward=0.0) for i in range(3))
    files.save(Profile(layers=layers), path)
    result = run(str(path), "--explain")
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output


def test_a_link_whose_latency_is_longer_than_the_work_is_not_used_for_gradients():
    words = (CLASSIFIER, "--workers", "4", "--schedule", "data-parallel")
    assert plan_of(*words, "--bandwidth", "1000Gbit")[0]["workers"] == 4
    assert plan_of(*words, "--latency", "1s")[0]["workers"] == 1


def test_fewer_layers_than_workers_leave_workers_idle(tmp_path):
    path = tmp_path / "x.profile"
    files.save(Profile(layers=(LayerCosts(name="only", forward=1.0),)), path)
    found = plan_of(str(path), "--workers", "4", "--max-replicas", "1")
    assert found[0]["workers"] == 1


def test_a_picture_of_the_best_plan(tmp_path):
    import xml.etree.ElementTree as ElementTree

    picture = tmp_path / "plan.svg"
    words = (CLASSIFIER, "--workers", "4", "--svg", str(picture), "--schedule", "async-1f1b")
    result = run(*words)
    assert result.exit_code == 0, result.output
    found = plan_of(*words)[0]
    text = "".join(ElementTree.parse(picture).getroot().itertext())
    assert "async-1f1b" in text
    for number, stage in enumerate(found["stages"]):
        for replica in range(len(stage["workers"])):
            several = len(stage["workers"]) > 1
            assert f"stage {number}" + f", replica {replica}" * several in text
    assert run(CLASSIFIER, "--workers", "2", "--svg", str(tmp_path)).exit_code != 0


def test_a_codec_for_the_slow_link():
    words = (CLASSIFIER, "--workers", "4", "--bandwidth", "1Gbit", "--max-replicas", "1")
    words = (*words, "--schedule", "async-1f1b")
    plain, coded = plan_of(*words)[0], plan_of(*words, "--codec", "0.27,1ms")[0]
    assert coded["throughput"] > plain["throughput"]
    assert any(stage["coded"] for stage in coded["stages"])
    assert "the codec pays, as Layout(codecs={(" in run(*words, "--codec", "0.27").output


@pytest.mark.parametrize("text", ["much", "0.3,soon", "2", "0"])
def test_what_is_no_codec_is_refused(text):
    result = run(CLASSIFIER, "--codec", text)
    assert result.exit_code != 0
    assert "codec" in result.output
