"""A loss is what the user wrote: what micro-batches weigh, and what is refused."""

import copy
import functools
import logging

import pytest
import torch
import torch.nn.functional as F
from support.both import opened
from support.device.references import computed_on_the_device
from support.labelled import IGNORED, Counts, classifier, labelled
from torch import nn

from pipedream_rt import ConfigError, StageFailed
from pipedream_rt.batches.items import Batch
from pipedream_rt.batches.weighing import Weighing, shares_of


@computed_on_the_device
def plain(model, data, loss_fn, steps=None):
    """The weights and the losses of plain PyTorch, with whole mini-batches."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, y in data[:steps]:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model.state_dict(), losses


def trained(model, data, loss_fn=None, **options):
    """The weights and the losses of a pipeline whose updates are those of plain PyTorch."""
    with opened(model, loss_fn, **{"micro_batches": None, **options}) as pipe:
        losses = [result.loss for result in pipe.train_epoch(data)]
        return pipe.state_dict(), losses


def assert_close(one, other):
    assert one[1] == pytest.approx(other[1], rel=1e-5)
    for name, tensor in one[0].items():
        torch.testing.assert_close(tensor, other[0][name], rtol=1e-5, atol=1e-6)


WEIGHTS = torch.tensor([1.0, 5.0, 0.2, 2.0, 1.0])

COUNTED = {
    "the function": F.cross_entropy,
    "the module": nn.CrossEntropyLoss(),
    "weights of classes": nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1),
    "another label": functools.partial(F.cross_entropy, ignore_index=2),
    "log probabilities": nn.NLLLoss(weight=WEIGHTS),
}
"""Losses whose labels are counted without a word of the user's."""

WEIGHED = {
    "a function around it": (
        lambda output, y: F.cross_entropy(output, y),
        lambda x, y: (y != IGNORED).sum(),
    ),
    "weights of classes": (
        lambda output, y: F.cross_entropy(output, y, weight=WEIGHTS.to(output.device)),
        lambda x, y: WEIGHTS[y[y != IGNORED]].sum().item(),
    ),
    "a sum over the whole": (
        lambda output, y: (output**2).sum(1)[y != IGNORED].sum() / (y != IGNORED).sum(),
        lambda x, y: int((y != IGNORED).sum()),
    ),
}
"""Losses of which the user says what they are means over."""


@pytest.mark.parametrize(
    ("weights", "samples", "shares"),
    [
        ([1, 3.0], [2, 2], [0.25, 0.75]),
        ([0, 0], [3, 1], [0.75, 0.25]),
        ([0, 0.0], [0, 0], [0.5, 0.5]),
        ([], [], []),
    ],
)
def test_shares_are_of_weights_of_samples_where_none_weighs_and_equal_where_there_are_none(
    weights, samples, shares
):
    assert shares_of(weights, samples) == shares


@pytest.mark.parametrize("k", [1, 3, 4])
@pytest.mark.parametrize("name", COUNTED)
def test_a_cross_entropy_of_torch_weighs_by_the_labels_that_count(name, k):
    model, data = classifier(), labelled(ignored=name != "another label")
    if name == "log probabilities":
        model.append(nn.LogSoftmax(dim=1))
    made = trained(model, data, COUNTED[name], micro_batches=k)
    expected = plain(model, data, COUNTED[name])
    assert_close(made, expected)
    if k == 1:  # the very bits
        assert made[1] == expected[1]
        assert all(torch.equal(t, expected[0][n]) for n, t in made[0].items())


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("name", WEIGHED)
def test_the_user_says_what_a_micro_batch_weighs(name, k):
    loss_fn, weigh = WEIGHED[name]
    model, data = classifier(), labelled()
    made = trained(model, data, loss_fn, weigh=weigh, micro_batches=k)
    assert_close(made, plain(model, data, loss_fn))


def test_the_first_gradient_of_an_asynchronous_schedule_is_that_of_the_whole_too():
    """Later ones are stale; the first update has none before it."""
    model, data = classifier(), labelled(count=1)
    options = {"schedule": "async-1f1b", "corrections": (), "stages": 3}
    assert_close(
        trained(model, data, F.cross_entropy, **options), plain(model, data, F.cross_entropy)
    )


def test_a_mini_batch_whose_labels_are_all_ignored_has_the_loss_of_plain_pytorch():
    """Which is NaN: it is an error, or ignored, as the user has said."""
    x, _ = labelled(count=1)[0]
    nothing = [(x, torch.full((8,), IGNORED))]
    with pytest.raises(StageFailed, match="nan"):
        trained(classifier(), nothing, F.cross_entropy, micro_batches=2)
    _, (loss,) = trained(classifier(), nothing, F.cross_entropy, micro_batches=2, on_nan="ignore")
    assert loss != loss


def test_weigh_gets_what_the_loader_yields():
    seen = []

    def weigh(*given):
        seen.append(given)
        return 1

    x, y = labelled(count=1)[0]
    options = {"micro_batches": 2, "check_loss": 0, "weigh": weigh}
    trained(classifier(), [(x, y)], F.cross_entropy, **options)
    assert [len(given) for given in seen] == [2, 2]
    assert torch.equal(torch.cat([given[1] for given in seen]), y)
    seen.clear()
    data = [{"x": x, "labels": y}]
    trained(Own(), data, example=data[0], **options)
    assert [sorted(given[0]) for given in seen] == [["labels", "x"]] * 2
    seen.clear()
    data = [((x,), {"labels": y}, None)]
    trained(Own(), data, example=data[0], **options)
    assert [(len(args), sorted(kwargs), target) for args, kwargs, target in seen] == [
        (1, ["labels"], None)
    ] * 2


@pytest.mark.parametrize(
    ("weigh", "words"),
    [
        (lambda x, y: 1 / 0, "weigh raised ZeroDivisionError"),
        (lambda x: 1, "weigh raised TypeError.*called with what the loader yields"),
        (lambda x, y: -1, "at least 0, it returned -1"),
        (lambda x, y: float("nan"), "at least 0, it returned nan"),
        (lambda x, y: y, "weigh raised"),
        (lambda x, y: None, "weigh raised TypeError"),
    ],
)
def test_a_bad_weight_is_refused_and_the_pipeline_goes_on(weigh, words):
    data = labelled(count=2)
    chosen = [weigh]
    options = {"micro_batches": 2, "weigh": lambda *given: chosen[0](*given)}
    with opened(classifier(), F.cross_entropy, schedule="async-1f1b", **options) as pipe:
        with pytest.raises(ConfigError, match=words):
            pipe.submit(*data[0])
        assert pipe.step == 0
        chosen[0] = lambda x, y: (y != IGNORED).sum()
        list(pipe.train_epoch(data))
        assert pipe.step == 2


def test_what_a_model_has_counted_itself_is_not_counted_again():
    batch = Batch((torch.ones(2, 3),), {}, torch.tensor([1, IGNORED]))
    weighing = Weighing(None, F.cross_entropy)
    assert [weighing.counted(batch, labels) for labels in (None, 5)] == [1, 5]


def test_what_is_no_function_weighs_nothing():
    with pytest.raises(ConfigError, match="weigh must be a function of a mini-batch"):
        trained(classifier(), [], F.cross_entropy, weigh=3)


# -- the comparison with the whole --------------------------------------------------------------


SUM = nn.CrossEntropyLoss(reduction="sum")


def dropped(output, y):
    return F.cross_entropy(F.dropout(output, 0.5), y)


def with_more(output, y):
    """A second part is a mean over samples."""
    return F.cross_entropy(output, y) + output.pow(2).mean()


@pytest.mark.parametrize("schedule", ["1f1b", "async-1f1b"])
def test_a_loss_that_is_no_mean_is_refused_with_both_numbers(schedule):
    data = labelled(ignored=False)
    model = classifier()
    with pytest.raises(StageFailed, match="the loss is no mean over samples") as caught:
        trained(model, data, SUM, schedule=schedule, micro_batches=4)
    whole = SUM(model(data[0][0]), data[0][1]).item()
    text = str(caught.value.__cause__)
    assert f"for 4 micro-batches together it is {whole:.3g}"[:-1] in text
    with pytest.raises(StageFailed):  # at most one mini-batch is trained on before
        trained(model, data[:1], SUM, schedule=schedule, micro_batches=2)
    trained(model, data, SUM, schedule=schedule, micro_batches=1)
    trained(model, data, SUM, schedule=schedule, micro_batches=4, check_loss=0)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("samples", [8, 7, 3])
def test_a_mean_is_not_refused_nor_changed_by_being_compared(samples, autocast, caplog):
    data = labelled(ignored=False, samples=samples)
    options = {"micro_batches": 4, "autocast": autocast}
    for loss_fn in (Counts(), F.cross_entropy):
        compared = trained(classifier(), data, loss_fn, check_loss=3, **options)
        left_out = trained(classifier(), data, loss_fn, check_loss=0, **options)
        assert compared[1] == left_out[1]
        assert all(torch.equal(tensor, left_out[0][n]) for n, tensor in compared[0].items())
    counts = "the forward of the loss changes 'calls'"
    assert not [each for each in caplog.messages if not each.startswith(counts)]


def test_labels_that_are_ignored_later_are_found_when_they_come():
    data = [*labelled(ignored=False), *labelled()]
    loss_fn = WEIGHED["a function around it"][0]
    with pytest.raises(StageFailed, match=r"F7: .*no mean"):
        trained(classifier(), data, loss_fn, micro_batches=2)
    trained(classifier(), data[:3], loss_fn, micro_batches=2)
    with pytest.raises(StageFailed, match=r"(?s)nan.*if none of its labels count.*weigh="):
        trained(classifier(), data, loss_fn, micro_batches=4)


def test_a_loss_that_draws_random_numbers_is_told_so(caplog):
    data = labelled(ignored=False)
    with caplog.at_level(logging.WARNING):
        compared = trained(classifier(), data, dropped, micro_batches=4)
    assert caplog.text.count("the loss draws random numbers") == 1
    left_out = trained(classifier(), data, dropped, micro_batches=4, check_loss=0)
    assert compared[1] == left_out[1]


def test_what_cannot_be_compared_is_told(caplog):
    class Within(nn.Module):
        """The last layer computes the loss."""

        def forward(self, x):
            return x.pow(2).mean()

    model = nn.Sequential(classifier(), Within())
    trained(model, labelled(), lambda output, y: output, micro_batches=4, check_loss=2)
    assert caplog.text.count("their outputs cannot be joined") == 1


def test_replicas_of_the_last_stage_compare_what_they_have():
    options = {"replicas": [1, 2], "micro_batches": 4, "stages": 2}
    data = labelled(ignored=False)
    trained(classifier(), data, F.cross_entropy, **options)
    with pytest.raises(StageFailed, match="for 2 micro-batches together"):
        trained(classifier(), data, SUM, **options)


@pytest.mark.processes
def test_workers_refuse_it_too_and_no_restart_is_tried():
    options = {"micro_batches": 4, "workers": "local", "max_restarts": 2}
    with pytest.raises(StageFailed, match="no mean"):
        trained(classifier(), labelled(ignored=False), SUM, **options)


# -- a model that computes its loss itself ------------------------------------------------------


class Own(nn.Module):
    """A model whose loss is a cross entropy of what it is given as labels, or another one."""

    def __init__(self, loss=F.cross_entropy):
        super().__init__()
        self.layers, self.loss = nn.ModuleList(classifier()), loss

    def forward(self, x, labels=None):
        for layer in self.layers:
            x = layer(x)
        return {"loss": self.loss(x, labels), "logits": x}


class Told(Own):
    """As models of transformers whose loss is told the number of labels of the whole."""

    def forward(self, x, labels=None, num_items_in_batch=None):
        for layer in self.layers:
            x = layer(x)
        if num_items_in_batch is None:
            return {"loss": F.cross_entropy(x, labels)}
        return {"loss": F.cross_entropy(x, labels, reduction="sum") / num_items_in_batch}


class ToldWrong(Told):
    """It is told, and takes a mean over the micro-batch all the same."""

    def forward(self, x, labels=None, num_items_in_batch=None):
        made = super().forward(x, labels)
        return {"loss": made["loss"] + 0 * torch.as_tensor(num_items_in_batch or 0)}


def named(data):
    return [{"x": x, "labels": y} for x, y in data]


def own(model, data, **options):
    return trained(model, named(data), example=named(data)[0], **options)


@computed_on_the_device
def plainly(model, data):
    """Plain PyTorch with a model that computes its loss itself."""

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = copy.deepcopy(model)

        def forward(self, batch):
            return self.model(**batch)["loss"]

    state, losses = plain(Whole(), [(b, None) for b in named(data)], lambda output, _: output)
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}, losses


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("model", [Own, Told])
def test_labels_that_a_model_counts_are_counted(model, k):
    assert_close(own(model(), labelled(), micro_batches=k), plainly(model(), labelled()))


def test_a_model_is_told_what_the_whole_weighs_by_the_user_too():
    weigh = lambda batch: (batch["labels"] != IGNORED).sum()  # noqa: E731
    made = own(Told(), labelled(), micro_batches=4, weigh=weigh)
    assert_close(made, plainly(Told(), labelled()))


@pytest.mark.parametrize("model", [Own(SUM), Own(with_more), ToldWrong()])
def test_a_model_whose_loss_is_no_weighed_mean_is_refused(model):
    with pytest.raises(ConfigError, match="the loss is no mean over samples"):
        own(model, labelled(), micro_batches=2)
    own(model, labelled(), micro_batches=2, check_loss=0)
    own(model, labelled(), micro_batches=1)


def test_a_second_part_that_is_a_mean_is_right_where_all_labels_count():
    data = labelled(ignored=False)
    assert_close(own(Own(with_more), data, micro_batches=4), plainly(Own(with_more), data))


def test_a_model_whose_loss_draws_random_numbers_is_told_so(caplog):
    data = labelled(ignored=False)
    user = lambda batch: len(batch["labels"])  # noqa: E731 - so that it is compared
    compared = own(Own(dropped), data, micro_batches=4, weigh=user)
    assert caplog.text.count("draws random numbers") == 1
    assert compared[1] == own(Own(dropped), data, micro_batches=4, weigh=user, check_loss=0)[1]


def test_an_evaluation_weighs_mini_batches_likewise():
    data = labelled(count=2)
    data[1] = (data[1][0][:5], data[1][1][:5])
    losses = [F.cross_entropy(classifier()(x), y, reduction="sum").item() for x, y in data]
    labels = sum(int((y != IGNORED).sum()) for _, y in data)
    with opened(classifier(), F.cross_entropy) as pipe:
        assert pipe.evaluate(data) == pytest.approx(sum(losses) / labels)
    with opened(Own(), None, example=named(data)[0]) as pipe:
        assert pipe.evaluate(named(data)) == pytest.approx(sum(losses) / labels)
