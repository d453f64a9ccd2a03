import copy
import re
from collections import OrderedDict

import pytest
import torch
from support.skips import unet
from torch import nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.job.unsplit_model import UnsplitModel
from pipedream_rt.models.layer_spec import LayerSpec


class Counts(nn.Module):
    """A buffer that grows in a forward, and one that is in no state dict."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", None)
        self.register_buffer("hidden", torch.zeros(1), persistent=False)


def sequential():
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(embed=nn.Linear(2, 3), norm=nn.BatchNorm1d(3), head=Counts()))


STATE = [
    "embed.weight", "embed.bias", "norm.weight", "norm.bias", "norm.running_mean",
    "norm.running_var", "norm.num_batches_tracked",
]  # fmt: skip


def shapes_of(model, **changes):
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    return {k: v for k, v in {**shapes, **changes}.items() if v is not None}


def test_layers_and_parameters_have_the_names_that_the_user_gave_them():
    model = sequential()
    unsplit = UnsplitModel(model)
    assert list(unsplit.sequence) == ["embed", "norm", "head"]
    assert [unsplit.names[id(p)] for p in model.parameters()] == STATE[:4]


def test_a_list_of_modules_is_named_by_position():
    unsplit = UnsplitModel(iter([nn.Linear(2, 2), nn.Linear(2, 2, bias=False)]))
    assert list(unsplit.sequence) == ["0", "1"]
    assert list(unsplit.names.values()) == ["0.weight", "0.bias", "1.weight"]


def test_frozen_parameters_are_not_trained_and_shared_ones_have_one_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].bias.requires_grad_(False)
    model[1].weight = model[0].weight
    assert list(UnsplitModel(model).names.values()) == ["0.weight", "1.bias"]


def test_what_is_no_sequence_of_layers_has_none():
    """It is taken whole; its parts are trees in which everything keeps its name."""
    model = nn.TransformerEncoderLayer(4, 2)
    unsplit = UnsplitModel(model)
    assert unsplit.sequence is None
    part = unsplit.part(["self_attn", "norm2"])
    assert part.norm2 is model.norm2
    assert set(part.state_dict()) == {k for k in model.state_dict() if k[:5] in ("self_", "norm2")}
    with pytest.raises(ConfigError, match="no layers"):
        UnsplitModel([])


@pytest.mark.parametrize("form", [nn.Sequential, nn.ModuleList, list])
def test_a_sequence_with_skips_is_a_model_that_must_be_recorded(form):
    layers = [*unet()]
    model = UnsplitModel(form(*layers) if form is nn.Sequential else form(layers))
    assert model.sequence is None
    assert model.elements == [str(i) for i in range(8)]
    assert list(model.whole.state_dict()) == list(nn.Sequential(*layers).state_dict())


def test_the_users_model_is_never_changed():
    model = sequential()
    before, training = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    unsplit = UnsplitModel(model)
    made = unsplit.copy_with({k: torch.ones_like(v) for k, v in model.state_dict().items()})
    made.eval()
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert [m.training for m in model.modules()] == training


def test_a_state_dict_comes_in_the_order_of_the_model():
    model = sequential()
    state = dict(reversed(model.state_dict().items()))
    assert list(UnsplitModel(model).in_order(state)) == STATE


# -- what does not fit ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"embed.bias": None}, "missing .*'embed.bias'.* unexpected .*none"),
        ({"tail": torch.ones(1)}, "missing .*none.* unexpected .*'tail'"),
        (
            {"norm.bias": torch.ones(4), "embed.bias": torch.ones(())},
            r"missing .*none.* unexpected .*none; embed.bias .*\(\).*\(3,\); "
            r"norm.bias .*\(4,\).*\(3,\)",
        ),
        (
            {"norm.bias": torch.ones(4), "embed.bias": None, "tail": torch.ones(1)},
            r"missing .*'embed.bias'.* unexpected .*'tail'.*; norm.bias .*\(4,\).*\(3,\)",
        ),
    ],
)
def test_a_state_dict_that_does_not_fit_is_refused_with_everything_that_is_wrong(changes, words):
    """A shape is given as it is, and as it is in the model."""
    model = sequential()
    state = {k: v for k, v in {**model.state_dict(), **changes}.items() if v is not None}
    with pytest.raises(ConfigError, match=words):
        UnsplitModel(model).require_fit(state)


def test_what_the_model_has_itself_fits_and_buffers_may_have_grown_or_be_new():
    model = sequential()
    UnsplitModel(model).require_fit(model.state_dict())
    assert UnsplitModel(model).first_misfit(shapes_of(model)) == ""
    grown = {"norm.running_mean": (9,), "head.seen": (4,), "norm.running_var": None}
    assert UnsplitModel(model).first_misfit(shapes_of(model, **grown)) == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm.bias": (4,)}, r"norm.bias .*\(4,\).*\(3,\)"),
        ({"norm.bias": None}, r"weight norm.bias \(shape \(3,\)\) is in the model and not in"),
        ({"tail": (1,)}, r"weight tail \(shape \(1,\)\) is in the checkpoint and not"),
        ({"norm.bias": (4,), "embed.bias": (4,)}, r"embed.bias .*\(4,\).*\(3,\)"),
    ],
)
def test_the_first_weight_that_differs_is_named_with_both_shapes(changes, words):
    """The saved one, then the model's."""
    model = sequential()
    assert re.match(words, UnsplitModel(model).first_misfit(shapes_of(model, **changes)))


# -- the copy ---------------------------------------------------------------------------------


class Named(nn.Sequential):
    """A user's class with something of its own."""

    def describe(self):
        return "mine"


def test_a_copy_is_of_the_users_own_class_and_has_the_state():
    model = Named(nn.Linear(2, 2), nn.BatchNorm1d(2))
    state = {k: torch.ones_like(v) for k, v in model.state_dict().items()}
    made = UnsplitModel(model).copy_with(state)
    assert made.describe() == "mine"
    assert all(torch.equal(made.state_dict()[k], v) for k, v in state.items())
    assert not {id(p) for p in made.parameters()} & {id(p) for p in model.parameters()}


def test_a_copy_of_a_list_is_a_sequential():
    model = [nn.Linear(2, 2), nn.ReLU()]
    made = UnsplitModel(model).copy_with({"0.weight": torch.eye(2), "0.bias": torch.ones(2)})
    assert type(made) is nn.Sequential
    assert made(torch.zeros(1, 2)).tolist() == [[1.0, 1.0]]


def test_a_copy_of_layers_that_workers_build_leaves_the_generator_of_the_script():
    model = UnsplitModel([LayerSpec(nn.Linear, 2, 2)])
    before = torch.get_rng_state()
    model.copy_with({"0.weight": torch.eye(2), "0.bias": torch.ones(2)})
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loss_has_weights_of_its_own_only_as_a_module():
    model, loss = sequential(), nn.Linear(1, 1)
    state = {"(loss).weight": torch.eye(1), "(loss).bias": torch.zeros(1), "head.x": torch.ones(1)}
    made = UnsplitModel(model, loss).loss_with(state)
    assert made is not loss
    assert made(torch.tensor([3.0])).item() == 3.0
    with pytest.raises(ConfigError, match=r"loss function is no nn\.Module, so it has no weigh"):
        UnsplitModel(model, print).loss_with(state)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method")  # torch.compile imports it
@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        (torch.compile, "which is model._orig_mod, and training=Training"),
        (nn.DataParallel, "wrapped in DataParallel.*give model.module"),
    ],
)
def test_a_model_that_is_wrapped_as_a_whole_is_answered_with_what_is_inside(wrap, words):
    with pytest.raises(ConfigError, match=words):
        UnsplitModel(wrap(nn.Sequential(nn.Linear(2, 2))))
