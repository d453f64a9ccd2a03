"""Workers that Ray places; `make engines` installs it."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from support import elastic
from support.deadlines import LATEST_S
from support.nodes import expected, own_environment

from pipedream_rt import RayWorkers
from pipedream_rt.cli import main
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
def test_a_node_of_ray_is_away_for_a_while(scenario):
    said = scenario("a_node_is_away_for_a_while")
    assert f"digest {elastic.expected()}" in said


@pytest.mark.processes
def test_ray_client_and_submitted_jobs(scenario):
    pytest.importorskip("grpc", reason="Ray Client needs ray[client]; make engines installs it")
    pytest.importorskip("aiohttp", reason="jobs need ray[default]; make engines installs it")
    said = scenario("from_elsewhere")
    assert said.count(expected(100)) == 2


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
    with pytest.raises(ConfigError, match=r'pip install "ray\[default\]>=2\.40"'):
        engine.RayWorkers()


def test_what_the_nodes_of_ray_run_is_made_of_what_the_command_was_given(monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(
        "pipedream_rt.cluster.engines.ray_nodes.run_on_ray", lambda *all: given.append(all) or 0
    )
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke
    assert run(main, ["run", "--ray=1", "--resume", "--", "x.py", "--ray", "2"]).exit_code == 0
    assert run(main, ["run", "--ray", "3", "--max_restarts", "9", "-m", "a.b"]).exit_code == 0
    (nodes, options, command, *_), second = given
    assert nodes == 1
    assert options == ["--nproc-per-node=1", "--threads=1", "--grace=60.0", "--resume"]
    assert command == [str(tmp_path / "x.py"), "--ray", "2"]
    assert second[0] == 3
    assert second[1][3:] == ["--max-restarts=9", "--module"]
    assert second[2] == ["a.b"]
    refused = run(main, ["run", "--ray", "3", "--node-rank", "0", "x.py"])
    assert refused.exit_code == 2
    assert "it is Ray that says which node is which" in refused.output
