"""Observers that others read: CSV, JSON lines, TensorBoard, Prometheus."""

import csv
import json

import pytest
from support.recorded import stepped, told, whole_run

from pipedream_rt import ConfigError
from pipedream_rt.observers import CSV, JSONLines, Prometheus, TensorBoard
from pipedream_rt.tracing.events import unpacked


def test_csv_has_a_row_for_each_mini_batch(tmp_path):
    told(CSV(tmp_path / "of" / "run.csv"), whole_run(5))
    with (tmp_path / "of" / "run.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(5))
    assert [float(row["loss"]) for row in rows] == [stepped(i).loss for i in range(5)]
    assert {row["rate"] for row in rows} == {"0.1"}


def test_a_second_run_adds_rows_and_no_second_head(tmp_path):
    observer = CSV(tmp_path / "run.csv")
    told(observer, whole_run(3))
    told(observer, whole_run(3))  # the same observer, given to another pipeline
    told(CSV(tmp_path / "run.csv"), whole_run(3))
    assert len((tmp_path / "run.csv").read_text().splitlines()) == 1 + 3 * 3


def test_json_lines_have_every_event(tmp_path):
    events = whole_run(5)
    told(JSONLines(tmp_path / "run.jsonl"), events)
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    kinds = [type(unpacked(json.loads(line))) for line in lines]
    assert kinds == [type(event) for event in events]


@pytest.mark.parametrize("kind", [CSV, JSONLines])
def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path, kind):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write to"):
        kind(tmp_path / "file" / "run")
    with pytest.raises(ConfigError, match="cannot write to"):
        kind(tmp_path)


def test_tensorboard_reads_what_is_written(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    told(TensorBoard(tmp_path), whole_run(5))
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    tags = set(found.Tags()["scalars"])
    assert {"train/loss", "train/rate", "train/staleness", "train/samples_per_s", "stage/busy/2",
            "eval/accuracy"} <= tags  # fmt: skip
    losses = found.Scalars("train/loss")
    assert [event.step for event in losses] == list(range(5))
    assert losses[2].value == pytest.approx(stepped(2).loss)


def test_tensorboard_has_file_systems_of_its_own(tmp_path, monkeypatch):
    """An address is for it to open; what it cannot is refused as by the others."""
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="TensorBoard cannot write to nowhere://run: "):
        TensorBoard("nowhere://run")
    told(TensorBoard("~/run"), whole_run(1))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("kind", "package"), [(TensorBoard, "tensorboard"), (Prometheus, "prometheus")]
)
def test_a_missing_package_is_named(monkeypatch, kind, package):
    for name in ("torch.utils.tensorboard", "prometheus_client"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(ConfigError, match=f"pip install {package}"):
        kind()
