"""What a model says before anything is decided."""

import pytest
import torch
import torch.nn.functional as F
from support.models import mlp
from torch import nn

from pipedream_rt import ConfigError, Layout, Training
from pipedream_rt.batches.forwards import SequenceForwards
from pipedream_rt.batches.items import ScriptCall
from pipedream_rt.job.options import Options
from pipedream_rt.job.reading import read_model, requested, split_of
from pipedream_rt.job.unsplit_model import UnsplitModel
from pipedream_rt.stage.spec import own_loss

SGD = (torch.optim.SGD, {"lr": 0.1})


class Own(nn.Module):
    """Computes its loss itself, if it is given labels."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, labels=None):
        output = self.second(self.first(x).relu())
        return output if labels is None else {"loss": F.mse_loss(output, labels), "output": output}


def read(model, **given):
    options = Options(**given)
    return read_model(requested(UnsplitModel(model, options.loss_fn), options))


def test_what_is_wrong_by_itself_is_refused_before_the_model_is_run():
    calls = []

    class Counted(Own):
        def forward(self, x):
            calls.append(x)
            return super().forward(x)

    for wrong in ({"training": Training(weigh=3)}, {"layout": Layout(weights="")}):
        options = Options(stages=2, example=torch.randn(4, 4), **wrong)
        with pytest.raises(ConfigError):
            requested(UnsplitModel(Counted()), options)
    assert not calls


def test_a_sequence_is_split_without_an_example():
    made = read(mlp(), stages=2, loss_fn=F.mse_loss, optimizer=SGD)
    assert isinstance(made.forwards, SequenceForwards)
    assert [name for names in made.split.layers for name in names] == list(made.model.sequence)
    assert made.loss_fn is F.mse_loss
    assert made.optimizer_class is torch.optim.SGD
    assert not made.loss_in_script
    assert made.pretrained is None


def test_the_groups_of_the_optimizer_are_named():
    model = mlp()
    first, *others = model.parameters()
    groups = torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": others}], lr=0.1)
    made = read(model, stages=2, loss_fn=F.mse_loss, optimizer=groups)
    (names, options), (rest, _) = made.optimizer.groups
    assert list(names) == ["0.weight"]
    assert options["lr"] == 0.5
    assert len(rest) == len(others)


def test_a_model_that_returns_a_loss_for_its_example_computes_it_itself():
    example = {"x": torch.randn(4, 4), "labels": torch.randn(4, 4)}
    made = read(Own(), stages=2, example=example, optimizer=SGD)
    assert made.loss_fn is own_loss
    assert made.forwards.own_loss
    assert not made.loss_in_script


def test_a_call_as_the_script_makes_it_leaves_the_loss_to_the_script():
    example = ScriptCall((torch.randn(4, 4), torch.randn(4, 4)), {}, None)
    made = read(Own(), stages=2, example=example, optimizer=SGD)
    assert made.loss_fn is None
    assert made.loss_in_script


def test_without_an_optimizer_nobody_computes_a_loss():
    made = read(mlp(), stages=2)
    assert made.optimizer_class is None
    assert not made.loss_in_script


def test_another_number_of_stages_of_the_same_request():
    options = Options(stages=2, example=torch.randn(4, 4))
    request = requested(UnsplitModel(Own()), options)
    alone = request._replace(options=Options(stages=1, example=options.example))
    assert [len(split_of(each).layers) for each in (request, alone)] == [2, 1]
