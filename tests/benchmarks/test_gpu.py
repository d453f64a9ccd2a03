"""What `make gpu` does before it measures: it says what is missing, and leaves nothing behind."""

import importlib.metadata
import os
import subprocess
import sys

import pytest

from benchmarks import gpu


def test_here_nothing_is_missing():
    assert gpu.missing() == []


def test_what_is_absent_or_too_old_is_named(monkeypatch):
    versions = {"torch": "2.8.1+cu130"}

    def version(name):
        if name == "cryptography":
            raise importlib.metadata.PackageNotFoundError(name)
        return versions.get(name, "99.0")

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert gpu.missing() == [
        "torch>=2.9 is needed, and 2.8.1+cu130 is installed", "cryptography is not installed",
    ]  # fmt: skip


def run(monkeypatch, *words):
    """The exit code, and the commands that were run."""
    ran = []

    def instead(command, **more):
        ran.append((command[1:4], more))
        return subprocess.CompletedProcess(command, 7)

    monkeypatch.setattr(gpu.subprocess, "run", instead)
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
    return gpu.main(), ran


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout where nothing is installed."""
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    (tmp_path / "setup.cfg").write_text(
        "[options]\ninstall_requires =\n    # reason\n    click\n"
        "[options.extras_require]\ntest =\n    pytest\n"
    )
    return tmp_path


def test_the_benchmark_finds_the_package_and_its_exit_code_is_that_of_all(checkout, monkeypatch):
    code, [(words, more)] = run(monkeypatch, "gpu", "--device", "cpu")
    assert (code, words, more["cwd"]) == (7, ["-m", "benchmarks", "gpu"], checkout)
    assert more["env"]["BENCHMARK_DEVICE"] == "cpu"
    assert str(checkout) in more["env"]["PYTHONPATH"].split(os.pathsep)


def test_on_another_device_the_results_are_apart(checkout, monkeypatch):
    monkeypatch.delenv("OUT", raising=False)
    _, [(_, here)] = run(monkeypatch, "gpu")
    assert not {"OUT", "BENCHMARK_DEVICE"} & here["env"].keys()
    _, [(_, there)] = run(monkeypatch, "gpu", "--device", "standin")
    assert there["env"]["OUT"] == str(checkout / "build/standin")
    first = there["env"]["PYTHONPATH"].partition(":")[0]
    assert first == str(checkout / "tests/support/device/autoload")
    monkeypatch.setenv("OUT", "mine")
    _, [(_, told)] = run(monkeypatch, "gpu", "--device", "cpu")
    assert told["env"]["OUT"] == "mine"


def test_nothing_runs_where_something_is_missing(checkout, monkeypatch, capsys):
    text = (checkout / "setup.cfg").read_text()
    (checkout / "setup.cfg").write_text(text.replace("click", "no-such-package"))
    assert run(monkeypatch, "gpu") == (1, [])
    said = capsys.readouterr().out
    assert "no-such-package is not installed" in said
    assert "--dest wheels no-such-package" in said


def test_a_folder_without_wheels_or_with_others_is_refused(checkout, monkeypatch):
    with pytest.raises(SystemExit, match="there is no wheel in"):
        run(monkeypatch, "gpu", "--wheels", str(checkout))
    (checkout / "x.whl").touch()
    with pytest.raises(SystemExit, match="are not for"):
        run(monkeypatch, "gpu", "--wheels", str(checkout))
