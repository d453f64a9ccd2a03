"""The step of an optimizer is called as torch would, where somebody wants to know of it."""

import functools

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from pipedream_rt.stage.stepping import step


def parameter():
    made = torch.nn.Parameter(torch.ones(2))
    made.grad = torch.ones(2)
    return made


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_it_computes_what_step_computes(cls):
    one, other = parameter(), parameter()
    step(cls([one], lr=0.1))
    cls([other], lr=0.1).step()
    assert torch.equal(one, other)
    assert not torch.equal(one, torch.ones(2))


def test_hooks_are_called():
    optimizer, called = torch.optim.SGD([parameter()], lr=0.1), []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: called.append("before")),
        optimizer.register_step_post_hook(lambda *_: called.append("after")),
        register_optimizer_step_post_hook(lambda *_: called.append("of all")),
    ]
    step(optimizer)
    for handle in handles:
        handle.remove()
    step(optimizer)
    assert called == ["before", "after", "of all"]


def test_a_profiler_sees_it():
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    with torch.profiler.profile() as profile:
        step(optimizer)
    assert any("Optimizer.step#SGD" in event.key for event in profile.key_averages())


def test_the_wrappers_of_others_are_called():
    called = []

    class Wrapped(torch.optim.SGD):
        @functools.wraps(torch.optim.SGD.step)
        def step(self, closure=None):
            called.append("class")
            return super().step(closure)

    optimizer = Wrapped([parameter()], lr=0.1)
    step(optimizer)
    before = optimizer.step

    def of_object(closure=None):
        called.append("object")
        return before(closure)

    optimizer.step = of_object
    step(optimizer)
    assert called == ["class", "object", "class"]


def test_a_scheduler_sees_it(recwarn):
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step(optimizer)
    scheduler.step()
    assert not [w for w in recwarn if "lr_scheduler.step()" in str(w.message)]
