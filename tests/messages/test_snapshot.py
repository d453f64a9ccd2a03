"""Errors of what was read from elsewhere are told with its place."""

import pytest

from pipedream_rt.errors import CheckpointError, ConfigError
from pipedream_rt.messages.snapshot import fitting, replica_name


@pytest.mark.parametrize(
    "error",
    [AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError, ZeroDivisionError],
)
def test_contents_that_do_not_fit_are_an_error_about_the_checkpoint(error):
    words = r"^run/step-3 does not fit this pipeline: to load it raised \w+\('size 3'\); was it wri"
    with pytest.raises(CheckpointError, match=words) as raised, fitting("run/step-3"):
        raise error("size 3")
    assert isinstance(raised.value.__cause__, error)


@pytest.mark.parametrize("error", [ConfigError("say so"), OSError("disk"), KeyboardInterrupt()])
def test_what_says_itself_what_is_wrong_stays_as_it_is(error):
    with pytest.raises(type(error)) as raised, fitting("run/step-3"):
        raise error
    assert raised.value is error


def test_what_a_checkpoint_makes_an_error_say_cannot_forge_lines_of_a_log():
    with pytest.raises(CheckpointError) as raised, fitting("run"):
        raise ValueError("\x1b[2J\n" + "x" * 5000)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 600


def test_the_state_of_a_replica_is_of_use_to_the_same_of_as_many():
    names = {replica_name(replica, count) for count in (2, 3) for replica in range(count)}
    assert len(names) == 5
    assert replica_name(1, 2) == "1 of 2"
