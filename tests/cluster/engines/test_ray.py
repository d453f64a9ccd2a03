"""Workers that Ray places; `make engines` installs it."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.deadlines import LATEST_S
from support.nodes import expected, own_environment

from pipedream_rt import RayWorkers
from pipedream_rt.cluster.engines import ray as engine
from pipedream_rt.errors import ConfigError

SCENARIOS = str(Path(__file__).parents[2] / "support" / "ray_scenarios.py")


@pytest.fixture
def scenario(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed; make engines installs it")

    def run(name):
        done = subprocess.run(
            [sys.executable, SCENARIOS, name, str(tmp_path / "run")], env=own_environment(),
            capture_output=True, text=True, timeout=LATEST_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    return run


@pytest.mark.processes
def test_a_node_of_ray_dies_and_the_bits_are_the_same(scenario):
    said = scenario("a_node_dies")
    assert expected(600) in said
    assert any("is gone" in line for line in said)


@pytest.mark.processes
def test_the_node_of_the_script_dies_and_ray_starts_it_again(scenario):
    said = "\n".join(scenario("the_node_of_the_script_dies"))
    assert expected(600) in said
    assert said.count("began at") == 2


@pytest.mark.processes
def test_what_ray_cannot_place_is_refused_with_what_there_is(scenario):
    large, spread = scenario("what_cannot_be_placed")[-2:]
    assert "Ray could not place 3 workers of CPU 2 each with PACK within 3 s" in large
    assert "it has 2 nodes (CPU 1, CPU 1), and CPU 2 free in all" in large
    assert "3 workers of CPU 1 each with STRICT_SPREAD within 3 s" in spread


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"strategy": "EVEN"}, "strategy must be one of PACK, SPREAD"),
        ({"resources": {}}, "resources must say what each worker needs"),
        ({"resources": {"CPU": -1}}, "resources must say what each worker needs"),
    ],
)
def test_options_that_make_no_sense(arguments, words):
    with pytest.raises(ConfigError, match=words):
        RayWorkers(**arguments)


def test_without_ray_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r'pip install "pipedream-rt\[ray\]"'):
        engine.RayWorkers()
