"""Forwards of a model that is no sequence: recorded once for each signature of inputs, then cut."""

import pickle

import pytest
import torch
from torch import nn

from pipedream_rt import ConfigError
from pipedream_rt.batches import recorded_forwards
from pipedream_rt.batches.items import Batch
from pipedream_rt.batches.recorded_forwards import RecordedForwards
from pipedream_rt.messages.message import Mode
from pipedream_rt.messages.tree import flat_copy, unflatten
from pipedream_rt.models.cut import find_layers


class Net(nn.Module):
    """Two layers, and a third where it is asked for; the scale goes to the second stage alone."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, x, scale=None, more=False, shift=False):
        x = self.b(self.a(x))
        if scale is not None:
            x = x * scale
        if shift:
            x = x + self.unused
        return self.c(x) if more else x


X, SCALE = torch.ones(2, 4), torch.full((2, 4), 2.0)
EXAMPLE = Batch((X, SCALE), {}, None)


def forwards_of(model=None, example=EXAMPLE, own_loss=False, **options):
    """The forwards of a model with two stages, of which the second begins at layer b."""
    model = model or Net()
    made = RecordedForwards(model, find_layers(model), **options)
    made.own_loss = own_loss
    made.begin(example, {Mode.TRAIN: made.record(example, Mode.TRAIN)}, ["b"])
    return made


def follow(forwards, *args, mode=Mode.TRAIN, training=None, **kwargs):
    return forwards.follow(flat_copy((args, kwargs)), mode, training).program


def test_a_program_is_recorded_once_for_each_signature():
    forwards = forwards_of()
    assert follow(forwards, X + 1, SCALE) == 0
    assert forwards.definitions == []  # the stages begin with that one
    longer = torch.ones(3, 4), torch.ones(3, 4)
    found = [
        follow(forwards, *longer),
        follow(forwards, X),
        follow(forwards, *longer),
        follow(forwards, X, SCALE, mode=Mode.INFER),
        follow(forwards, X, SCALE, mode=Mode.EVALUATE),
        follow(forwards, X, SCALE, training=False),
        follow(forwards, X, torch.full((4, 2), 2.0).t()),
        follow(forwards, X, SCALE),
    ]
    # An evaluation needs no program beside that of inference; other strides need one.
    assert found == [1, 2, 1, 3, 3, 4, 5, 0]
    assert len(forwards.definitions) == 5
    assert [len(pickle.loads(each)) for each in forwards.definitions] == [2] * 5  # of each stage
    assert forwards.how == "cut by a recorded forward: 6 programs so far"


def test_inputs_go_to_the_stages_that_need_them():
    forwards = forwards_of()
    assert (forwards.entries, forwards.links) == ((0, 1), ((0, 1),))
    given = flat_copy(((X, SCALE), {}))
    shares = {
        stage: unflatten(structure, tensors)
        for stage, structure, tensors in forwards.shares(0, given)
    }
    assert shares.keys() == {0, 1}
    assert torch.equal(shares[0], X)
    assert torch.equal(shares[1], SCALE)
    # Without a scale, stage 1 gets nothing, but its turn comes all the same.
    number = follow(forwards, X)
    assert [
        (stage, unflatten(structure, tensors))
        for stage, structure, tensors in forwards.shares(number, flat_copy(((X,), {})))
    ][1] == (1, ())
    lines = forwards.program().splitlines()
    assert "stage 1 takes [1] from the coordinator" in lines
    assert lines[-1] == "    return 4"


def test_a_mini_batch_may_not_ask_for_what_no_stage_has():
    forwards = forwards_of()
    with pytest.raises(ConfigError, match="makes the model call c, which it did not call with the"):
        follow(forwards, X, SCALE, more=True)
    with pytest.raises(ConfigError, match="use unused on stage 1, which was sent only what the"):
        follow(forwards, X, SCALE, shift=True)
    assert len(forwards.cuts) == 1  # what was refused leaves no trace
    assert "c" not in forwards.homes
    assert follow(forwards, X) == 1


def test_a_model_whose_inputs_differ_in_every_mini_batch_is_refused(monkeypatch):
    monkeypatch.setattr(recorded_forwards, "_MOST", 3)
    forwards = forwards_of()
    for samples in (3, 5):
        follow(forwards, torch.ones(samples, 4))
    with pytest.raises(ConfigError, match=r"has taken 3 ways so far.*Pad the inputs to a few"):
        follow(forwards, torch.ones(7, 4))
    assert follow(forwards, torch.ones(5, 4)) == 2


class Own(Net):
    def forward(self, x, labels=None):
        x = super().forward(x)
        if labels is None:
            return {"logits": x}
        return {"loss": nn.functional.cross_entropy(x, labels), "logits": x}


def test_a_model_that_computes_its_loss_says_over_how_many_labels():
    labels = torch.tensor([1, -100])
    forwards = forwards_of(Own(), Batch((X, labels), {}, None), own_loss=True)
    found = forwards.follow(flat_copy(((X, labels), {})), Mode.TRAIN, None)
    assert (found.program, int(found.labels), found.only_labels) == (0, 1, True)
    both = forwards.follow(flat_copy(((X, labels.abs() % 4), {})), Mode.TRAIN, None)
    assert int(both.labels) == 2
    with pytest.raises(ConfigError, match="what the model returns has no loss: give loss_fn"):
        follow(forwards, X)
    assert follow(forwards, X, mode=Mode.INFER) == 1


@pytest.mark.parametrize(
    ("weights", "autocast", "dtype"),
    [
        (torch.float32, None, torch.float32),
        (torch.float64, None, torch.float32),
        (torch.bfloat16, None, torch.bfloat16),
        (torch.float32, torch.float16, torch.float16),
    ],
    ids=str,
)
def test_the_coarsest_dtype_counts(weights, autocast, dtype):
    model = Net().to(weights)
    assert RecordedForwards(model, find_layers(model), autocast).dtype is dtype
