"""Versions of the weights that are kept for as long as the script reads them."""

import pytest
import torch
from support.inside import feed_log, stages
from support.models import regression
from support.small import small

from pipedream_rt import Checkpoints, ConfigError, PipelineClosed
from pipedream_rt.coordinator.feed.feeder import Feeder
from pipedream_rt.coordinator.recovery.feed_log import RestorePoint
from pipedream_rt.coordinator.recovery.group import WorkerGroup

DATA = regression(4)


def test_it_reads_the_weights_of_its_step_while_training_goes_on():
    with small() as pipe:
        list(pipe.train_epoch(DATA[:2]))
        loss = pipe.evaluate(DATA)
        with pipe.keep_version() as version:
            assert (version.step, repr(version)) == (2, "<the weights after step 2>")
            list(pipe.train_epoch(DATA))
            assert pipe.evaluate(DATA, version=version) == loss
            assert pipe.evaluate(DATA) != loss
        assert repr(version) == "<the weights after step 2, dropped>"


def test_several_are_kept_at_a_time_each_with_its_own_weights():
    with small() as pipe:
        kept, losses = [], []
        for item in DATA[:3]:
            kept.append(pipe.keep_version())
            losses.append(pipe.evaluate(DATA))
            list(pipe.train_epoch([item]))
        kept[1].drop()
        assert pipe.evaluate(DATA, version=kept[0]) == losses[0]
        assert pipe.evaluate(DATA, version=kept[2]) == losses[2]


def test_one_that_cannot_be_read_any_more_says_why():
    with small() as pipe, small() as other:
        version, second = pipe.keep_version(), pipe.keep_version()
        with pytest.raises(ConfigError, match="the version is one of another pipeline"):
            other.evaluate(DATA, version=version)
        version.drop()
        version.drop()
        with pytest.raises(ConfigError, match="of step 0 was dropped; keep another one"):
            pipe.evaluate(DATA, version=version)
        pipe.load_state_dict(pipe.state_dict())
        with pytest.raises(ConfigError, match=r"made before load\(\) or load_state_dict\(\)"):
            pipe.evaluate(DATA, version=second)
        with pipe.keep_version() as third:  # of what was loaded
            assert pipe.evaluate(DATA, version=third) == pipe.evaluate(DATA)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_and_ctrl_c_drop_it_and_wait_for_no_stage(error, monkeypatch):
    def leave():
        with pipe.keep_version():
            monkeypatch.setattr(WorkerGroup, "take", lambda self, key: pytest.fail("it waits"))
            raise error

    with small() as pipe:
        with pytest.raises(error):
            leave()
        monkeypatch.undo()
        assert_dropped(pipe)


@pytest.mark.parametrize("error", [ConfigError, KeyboardInterrupt])
def test_one_that_could_not_be_made_holds_nothing(error, monkeypatch):
    def fail(*_):
        raise error

    with small() as pipe:
        with monkeypatch.context() as patch:
            patch.setattr(WorkerGroup, "command", fail)
            patch.setattr(Feeder, "flush", lambda self: None)
            with pytest.raises(error):
                pipe.keep_version()
        assert_dropped(pipe)


def assert_dropped(pipe):
    """Neither do stages keep a version, nor does the log what was fed."""
    point = RestorePoint(position=pipe.step)
    feed_log(pipe).begin(point)
    assert feed_log(pipe).restore_points[-1] is point
    pipe.evaluate(DATA)  # so that the stages have come that far
    assert not any(stage.kept._versions for stage in stages(pipe))


def test_a_recovery_goes_back_to_before_it_was_made(tmp_path):
    """So no newer checkpoint takes the place of the point that is needed, until it is dropped."""
    with small(checkpoint=Checkpoints(tmp_path)) as pipe:
        log = feed_log(pipe)
        version = pipe.keep_version()
        list(pipe.train_epoch(DATA[:1]))
        folder = pipe.save()
        assert [point.folder for point in log.restore_points] == [None]
        version.drop()
        assert [point.folder for point in log.restore_points] == [None, folder]


def test_an_average_is_that_of_the_weights_and_needs_one():
    with small(ema=0.5) as pipe, small() as plain:
        states = []
        for item in DATA[:2]:
            list(pipe.train_epoch([item]))
            states.append(pipe.state_dict())
        with pipe.keep_version(ema=True) as version:
            assert repr(version) == "<the average of the weights after step 2>"
            found = pipe.state_dict(version=version)
        with pytest.raises(ConfigError, match=r"give training=Training\(ema=0\.999"):
            plain.keep_version(ema=True)
    first, second = (state["2.weight"] for state in states)
    torch.testing.assert_close(found["2.weight"], (first + second) / 2)


def test_one_that_outlives_its_pipeline_is_dropped_without_a_word():
    with small() as pipe:
        version = pipe.keep_version()
    with pytest.raises(PipelineClosed):
        pipe.evaluate(DATA, version=version)
    version.drop()
    assert repr(version).endswith("dropped>")
