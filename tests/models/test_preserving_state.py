"""The model of a user is looked at, and it and its surroundings are left as they were."""

import random
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Event

import numpy as np
import pytest
import torch
from support.deadlines import LATEST_S
from torch import nn

from pipedream_rt.errors import ConfigError, PipelineError
from pipedream_rt.models import preserving_state
from pipedream_rt.models.mark import mark_of_draws_outside
from pipedream_rt.models.modes import Modes
from pipedream_rt.models.preserving_state import (
    Left,
    as_it_was,
    called_with,
    drawing_alone,
    kept_outside,
    mode_set,
    modules_inside,
    refill,
    refuse_unfit_modules,
)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.register_buffer("mean", torch.zeros(2))
        self.calls, self.seen = 0, [1]


def layers(model):
    return {f"blocks.{number}": block for number, block in enumerate(model.blocks)}


def looked_at(change, model=None):
    """What is left of a model after a body has changed it, and the error."""
    model = model or Model()
    before = dict(vars(model)), dict(model._buffers), [*model.seen], dict(model._modules)
    error = None
    try:
        with as_it_was(model, layers(model)):
            change(model)
    except ConfigError as refused:
        error = str(refused)
    assert (dict(vars(model)), dict(model._buffers), [*model.seen], dict(model._modules)) == before
    return error


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: setattr(m, "calls", 1), "changes the attribute 'calls' of the model"),
        (lambda m: setattr(m, "new", 1), "changes the attribute 'new' of the model"),
        (lambda m: m.seen.append(2), "changes the attribute 'seen' of the model"),
        (lambda m: setattr(m, "mean", torch.ones(2)), "changes the attribute 'mean' of the"),
        (lambda m: m.register_module("more", nn.ReLU()), "the attribute 'more' of the model"),
        (lambda m: setattr(m.blocks, "kept", 1), "changes the attribute 'kept' of blocks"),
        (lambda m: torch.manual_seed(99), r"calls torch.manual_seed"),
        (lambda m: random.random(), "draws random numbers of Python or NumPy"),
        (lambda m: np.random.rand(), "draws random numbers of Python or NumPy"),
    ],
    ids=["attribute", "new", "list", "buffer", "module", "inner", "seed", "python", "numpy"],
)
def test_what_a_forward_changes_outside_of_layers_is_put_back_and_refused(change, words):
    assert words in looked_at(change)


def test_what_a_body_leaves_can_be_left_once_more():
    model, left = Model(), Left()

    def change():
        model.calls, model.new = 1, "x"
        model.seen.append(2)
        model.register_buffer("table", torch.ones(2), persistent=False)

    with as_it_was(model, layers(model), left):
        change()
    assert (model.calls, model.seen, hasattr(model, "table")) == (0, [1], False)
    names = {f"'{key}' of the model" for key in ("calls", "new", "seen", "table")}
    assert names <= left.values.keys()
    again = Left()
    with as_it_was(model, layers(model), again, left):
        assert (model.calls, model.new, model.seen) == (1, "x", [1, 2])
        assert torch.equal(model.table, torch.ones(2))
    assert again.values.keys() == left.values.keys()
    assert not hasattr(model, "table")


def test_a_layer_may_keep_what_it_likes_and_it_is_put_back_too():
    model = Model()
    assert looked_at(lambda m: setattr(m.blocks[0], "calls", 1), model) is None
    assert not hasattr(model.blocks[0], "calls")
    assert looked_at(lambda m: m.eval()) is None
    before = torch.get_rng_state()
    assert looked_at(lambda m: torch.rand(3), model) is None
    assert torch.equal(torch.get_rng_state(), before)


def test_an_error_of_the_body_says_more_and_the_model_is_put_back():
    model = Model()
    with pytest.raises(ZeroDivisionError), as_it_was(model, layers(model)):
        model.calls = 1 / 0 if model.seen.append(2) else 1 // 0
    assert (model.calls, model.seen) == (0, [1])


class Raises(nn.Module):
    def forward(self, x):
        return torch.ones(2) @ x


def test_an_error_of_a_forward_names_the_users_line_and_the_mode():
    words = rf"of the model, a Raises, does not take the example .* at {__file__}:\d+ in forward"
    with pytest.raises(ConfigError, match=words) as caught:
        called_with(Raises(), [torch.ones(3)], {})
    assert isinstance(caught.value.__cause__, RuntimeError)
    with torch.no_grad(), pytest.raises(ConfigError, match="in eval mode, without gradients"):
        called_with(Raises(), [torch.ones(3)], {})
    assert "prepare=" not in str(caught.value)


def test_a_wrong_call_of_a_forward_is_shown_how_items_are_read():
    words = r"TypeError: .*unexpected keyword argument 'mask'. .*item: \(\(a, b\), {}, y\)$"
    with pytest.raises(ConfigError, match=words):
        called_with(Raises(), [torch.ones(2)], {"mask": 1})


def compiled(module):
    module._compiled_call_impl = print  # as Module.compile sets it


def hooked(module):
    module.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (compiled, r"{} is compiled as a whole.*Training\(compile=True\)"),
        (hooked, "{} has hooks, .* put them on one of the layers, such as blocks.0"),
    ],
)
def test_what_would_be_lost_when_a_model_is_taken_apart_is_refused(change, words):
    model = Model()
    change(model.blocks[0])
    refuse_unfit_modules(model, layers(model))  # a layer stays whole
    change(model.blocks)
    with pytest.raises(ConfigError, match=words.format("blocks")):
        refuse_unfit_modules(model, layers(model))
    model = Model()
    change(model)
    with pytest.raises(ConfigError, match=words.format("the model")):
        refuse_unfit_modules(model, layers(model))


def test_modes_are_set_without_a_call_of_train_and_put_back():
    class Own(Model):
        def train(self, mode=True):
            raise AssertionError

    model = Own()
    model.blocks[1].training = False
    with mode_set(model, True, Modes(in_training=("blocks.0",), in_eval=("blocks.1",))):
        assert [block.training for block in model.blocks] == [False, True]
    with mode_set(model, False, Modes(in_training=("blocks.0",), in_eval=("blocks.1",))):
        assert [block.training for block in model.blocks] == [False, True]
        assert not model.training
    with mode_set(model, None, Modes()):
        model.training = False
    assert [model.training, *(block.training for block in model.blocks)] == [True, True, False]


def test_random_numbers_outside_of_torch_go_on_as_before():
    before = mark_of_draws_outside()
    with kept_outside():
        random.random()
        np.random.rand()
        assert mark_of_draws_outside() != before
    assert mark_of_draws_outside() == before


@pytest.mark.parametrize("kind", [list, set, dict.fromkeys])
def test_a_container_gets_its_content_and_stays_the_same_object(kind):
    held, content = kind([1, 2]), kind([3])
    other = held
    refill(held, content)
    assert other == content
    assert other is not content


def test_inside_are_the_layers_and_what_is_in_them():
    model = nn.Sequential(nn.Sequential(nn.ReLU()), nn.Linear(2, 2))
    assert modules_inside({"0": model[0]}) == {id(model[0]), id(model[0][0])}


def test_one_thread_draws_at_a_time_and_may_enter_again():
    def other():
        free = preserving_state._computing.acquire(blocking=False)
        if free:
            preserving_state._computing.release()
        return free

    with ThreadPoolExecutor(1) as pool:
        with drawing_alone(), drawing_alone():
            assert not pool.submit(other).result()
        assert pool.submit(other).result()


def test_a_thread_that_waits_for_ever_says_what_it_waits_for(monkeypatch):
    def other():
        with drawing_alone():
            return None

    monkeypatch.setattr(preserving_state, "_LONGEST", timedelta())
    with ThreadPoolExecutor(1) as pool, drawing_alone():
        error = pool.submit(other).exception()
    assert isinstance(error, PipelineError)
    assert "another thread" in str(error)
    assert 'workers="local"' in str(error)


def test_a_child_that_is_forked_while_another_thread_draws_may_draw():
    lock, held = preserving_state._computing, Event()
    done = Event()

    def draw():
        with drawing_alone():
            held.set()
            done.wait(LATEST_S)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(draw)
        held.wait(LATEST_S)
        try:
            preserving_state._forget()  # what a forked child does
            with drawing_alone():
                pass
        finally:
            preserving_state._computing = lock
            done.set()
