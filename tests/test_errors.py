import inspect
import pickle

import pytest

from pipedream_rt import errors

SAMPLES = [
    errors.PipelineError("m"),
    errors.ConfigError("m"),
    errors.ScheduleError("m"),
    errors.VersionError("m"),
    errors.TransportError("m"),
    errors.RendezvousTimeout("m", missing=2),
    errors.MessageTimeout("m"),
    errors.PeerLost("m", peer="w"),
    errors.TraceError("m"),
    errors.CheckpointError("m"),
    errors.WorkerLost("m", worker="w", stage=1),
    errors.StageFailed("m", stage=1, action="F3", trace="t"),
    errors.NonFiniteLoss("m", stage=1, action="F3"),
    errors.PoisonedMicroBatch("m", micro_batch=3, stage=1),
    errors.RemoteError("m"),
    errors.UnknownOption("m"),
    errors.PipelineClosed("m"),
]


def test_every_error_is_sampled():
    defined = {
        c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__
    }
    assert defined == {type(e) for e in SAMPLES}


@pytest.mark.parametrize("error", SAMPLES, ids=lambda e: type(e).__name__)
def test_every_error_survives_pickling(error):
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error)
    assert found.args == error.args
    assert found.__dict__ == error.__dict__


def test_an_error_of_the_system_survives_behind_it():
    for cause in (FileNotFoundError(2, "No such file", "name"), KeyError("k")):
        error = errors.CheckpointError("m")
        error.__cause__ = cause
        found = pickle.loads(pickle.dumps(error)).__cause__
        assert repr(found) == repr(cause if isinstance(cause, OSError) else None)


def test_the_tree_is_drawn_in_the_docstring():
    for error in SAMPLES:
        assert type(error).__name__ in (errors.__doc__ or "") or type(error) is errors.RemoteError


def test_wrong_arguments_are_also_value_errors():
    assert issubclass(errors.ConfigError, ValueError)
