"""What a stage is made of, as it is sent: the loss of a result, the code, and how it is built."""

import types

import pytest
import torch
import torch.nn.functional as F
from support.models import mlp
from support.stages import a_spec, specs_of
from torch import nn

from pipedream_rt.codecs import Int8
from pipedream_rt.corrections import Correction
from pipedream_rt.stage.parameters import GradientHook
from pipedream_rt.stage.rules.corrections import Correcting
from pipedream_rt.stage.spec import has_own_loss, own_loss, total_of


def test_the_total_of_a_loss_is_what_is_trained_on_and_the_rest_is_told():
    loss = torch.tensor(1.0)
    assert total_of(loss) == (loss, {})
    assert total_of({"l1": 2.0, "loss": loss}) == (loss, {"l1": 2.0})
    assert total_of(types.MappingProxyType({"loss": loss})) == (loss, {})
    assert total_of({"l1": 2.0}) == (None, {"l1": 2.0})


OUTPUTS = {
    "a dict": lambda loss: {"loss": loss},
    "an object": lambda loss: types.SimpleNamespace(loss=loss),
}


@pytest.mark.parametrize("made", OUTPUTS)
def test_a_model_may_compute_its_own_loss(made):
    loss = torch.tensor(1.0)
    output = OUTPUTS[made](loss)
    assert has_own_loss(output)
    assert own_loss(output, None) is loss
    assert not has_own_loss(OUTPUTS[made](None))  # as where no labels were given


@pytest.mark.parametrize("output", [{"logits": 1}, torch.ones(1), None], ids=str)
def test_other_outputs_have_no_loss(output):
    assert not has_own_loss(output)


# -- code -------------------------------------------------------------------------------------


class Layer(nn.Linear):
    pass


class Made(Correction):
    def before_step(self, at, optimizer):
        pass


class Coded(Int8):
    pass


def loss_of_this_file(x, y):
    return F.mse_loss(x, y)


def hook_of_this_file(gradient):
    return gradient


@pytest.mark.parametrize(
    "options",
    [
        {"layers": [Layer(1, 1)]},
        {"loss_fn": loss_of_this_file},
        {"rules": (Correcting((Made(),)),)},
        {"codecs": {(0, 1): Coded()}},
        {"hooks": (GradientHook("0.weight", False, hook_of_this_file),)},
    ],
    ids=["layers", "loss", "rules", "codecs", "hooks"],
)
def test_the_code_of_all_that_the_user_wrote_is_compared(options):
    given = {"layers": [nn.Linear(2, 2)], **options}
    assert any(__name__ in key for key in a_spec(**given).own_code())


def test_the_code_of_what_has_no_code_of_the_user_is_not():
    assert not any(
        __name__ in key for key in a_spec([nn.Linear(2, 2)], loss_fn=F.mse_loss).own_code()
    )


# -- building ---------------------------------------------------------------------------------


def test_each_layer_of_the_plan_is_compiled_as_it_is_told(monkeypatch):
    compiled = []
    monkeypatch.setattr(
        nn.Module, "compile", lambda self, **options: compiled.append((self, options))
    )
    for options in (False, {"dynamic": True}):
        for spec in specs_of(mlp(), stages=2, loss_fn=F.mse_loss, compile=options):
            compiled.clear()
            spec.build()
            expected = [spec.layers.get_submodule(name) for name in spec.plan.layers[spec.stage]]
            assert [layer for layer, _ in compiled] == (expected if options else [])
            assert all(given == options for _, given in compiled)


def test_buffers_over_received_memory_are_the_stages_own_after_it_is_built():
    received = bytearray(8)
    layer = nn.Linear(2, 2)
    layer.register_buffer("table", torch.frombuffer(received, dtype=torch.float32))
    a_spec([layer]).build()
    layer.table.resize_(3).fill_(1)
    assert received == bytearray(8)
