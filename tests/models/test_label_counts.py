"""How many labels the loss of a model is a mean over."""

import pytest
import torch
import torch.nn.functional as F
from support.between import Forward, recorded

from pipedream_rt.models.label_counts import is_mean, label_count_of

X = torch.randn(2, 3, 4)
LABELS = torch.tensor([[0, -100, 2], [3, 1, -100]])


def count(loss, labels=LABELS):
    model = Forward(lambda self, x, labels: loss(self.a(x), labels))
    found = label_count_of(recorded(model, X, LABELS))
    return None if found is None else found.of([X, labels])


def flat(output, labels, **options):
    return F.cross_entropy(output.flatten(0, 1), labels.flatten(), **options)


def shifted(output, labels):
    """As models of texts do: each label is for the token before."""
    return flat(output[:, :-1], labels[:, 1:].contiguous())


def ignoring_one(output, labels):
    return flat(output, labels.clamp(min=0), ignore_index=0)


def by_name(output, labels):
    return F.cross_entropy(input=output.flatten(0, 1), target=labels.flatten())


def likelihood(output, labels):
    return F.nll_loss(output.flatten(0, 1).log_softmax(-1), labels.flatten())


@pytest.mark.parametrize(
    ("loss", "expected"),
    [(flat, 4), (shifted, 2), (ignoring_one, 3), (by_name, 4), (likelihood, 4)],
)
def test_labels_that_count_are_counted(loss, expected):
    assert count(loss) == expected


def test_they_are_those_of_the_mini_batch_and_not_of_the_one_that_was_recorded():
    assert count(shifted, torch.full((2, 3), -100)) == 0
    assert count(shifted, torch.zeros(2, 3, dtype=torch.long)) == 4
    assert count(flat, torch.zeros(5, 3, dtype=torch.long)) == 15


def two_means(output, labels):
    return flat(output, labels) + flat(2 * output, labels)


def weighted(output, labels):
    return flat(output, labels, weight=torch.ones(4))


def weighted_by_place(output, labels):
    return F.cross_entropy(output.flatten(0, 1), labels.flatten(), torch.ones(4))


def of_the_output(output, labels):
    return flat(output, output.detach().argmax(-1))


def changed_in_place(output, labels):
    labels[0, 0] = -100
    return flat(output, labels)


@pytest.mark.parametrize(
    "loss",
    [
        two_means,
        weighted,
        weighted_by_place,
        of_the_output,
        changed_in_place,
        lambda output, labels: flat(output, labels, reduction="sum"),
        lambda output, labels: output.mean(),
    ],
    ids=["two", "weighted", "by place", "of the output", "in place", "sum", "no cross entropy"],
)
def test_what_is_no_plain_mean_over_labels_of_the_inputs_is_not_counted(loss):
    assert count(loss) is None


@pytest.mark.parametrize(
    ("given", "mean"),
    [
        ({}, True),
        ({"reduction": "mean"}, True),
        ({"reduction": "none"}, False),
        ({"size_average": None, "reduce": None}, True),
        ({"size_average": False, "reduction": "mean"}, False),
        ({"reduce": True}, False),
    ],
    ids=str,
)
def test_a_mean_is_what_the_arguments_ask_for(given, mean):
    """The old names override the new one."""
    assert is_mean(given) is mean
