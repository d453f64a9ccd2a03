"""What people look for on a pipeline because a module has it."""

import copy
import pickle

import pytest
from support.models import regression
from support.small import small
from torch import nn

from pipedream_rt import ConfigError
from pipedream_rt.coordinator.views.attribute_hints import ADVICE


@pytest.fixture(scope="module")
def pipe():
    with small() as made:
        yield made


@pytest.mark.parametrize("name", ADVICE)
def test_what_is_not_there_says_what_to_do_instead(pipe, name):
    with pytest.raises(AttributeError) as caught:
        getattr(pipe, name)
    assert str(caught.value) == f"a Pipeline has no attribute {name!r}: {ADVICE[name]}"
    assert not hasattr(pipe, name)


def test_a_word_that_is_misspelt_is_suggested(pipe):
    with pytest.raises(AttributeError, match="has no attribute 'train_epochs'") as caught:
        pipe.train_epochs  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("train_epochs", pipe)  # Python makes one of it


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_it_can_be_neither_pickled_nor_copied(pipe, copied):
    with pytest.raises(ConfigError, match=r"neither pickled nor copied: pipe\.save"):
        copied(pipe)
    list(pipe.train_epoch(regression(2)))


@pytest.mark.parametrize("loader", [5, None, len, nn.Linear(1, 1)])
def test_a_loader_that_yields_nothing_is_refused_and_the_pipeline_goes_on(pipe, loader):
    calls = {
        "train_epoch": lambda: list(pipe.train_epoch(loader)),
        "evaluate": lambda: pipe.evaluate(loader),
        "predict": lambda: list(pipe.predict(loader)),
    }
    for name, call in calls.items():
        with pytest.raises(ConfigError, match=f"{name} takes a loader, something that yields"):
            call()
    epoch = pipe.epoch
    list(pipe.train_epoch(regression(2)))
    assert pipe.epoch == epoch + 1
