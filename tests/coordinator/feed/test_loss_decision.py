"""Of what a loss is computed, before and after the first mini-batch; without a pipeline."""

import pytest
import torch

from pipedream_rt import Along, ConfigError
from pipedream_rt.batches.items import Accumulated, Batch
from pipedream_rt.batches.micro_batches import EMPTY, CutBatch
from pipedream_rt.coordinator.feed.loss_decision import LossDecision
from pipedream_rt.messages.head import OfLoss
from pipedream_rt.messages.message import Loss

X = torch.ones(4, 2)
BATCH = Batch((X,), {}, X)


def cut(filled=2, batch=BATCH, **options):
    parts = [EMPTY._replace(samples=2)] * filled + [EMPTY] * (4 - filled)
    return CutBatch(batch, parts, **options)


def decision(of_loss, own=False):
    made, said = LossDecision(of_loss, own), []
    made.announce = said.append
    return made, said


def kinds(cut):
    return {part.loss for part in cut.parts}


@pytest.mark.parametrize("of_loss", OfLoss)
def test_all_parts_are_told_of_what_the_loss_is(of_loss):
    made, _ = decision(of_loss)
    applied = made.applied(cut())
    assert kinds(applied) == {of_loss}
    assert made.applied(applied) is applied


def test_what_was_to_decide_is_told_again_what_was_decided():
    made, said = decision(OfLoss.DECIDE)
    undecided = made.applied(cut())
    made.came([Loss(loss=None, trail=[]), Loss(loss=3.0, trail=[], whole="it adds up")])
    assert (made.of_loss, made.whole) == (OfLoss.WHOLE, True)
    assert kinds(made.applied(undecided)) == {OfLoss.WHOLE}
    assert said == [
        'chosen: loss="whole": it adds up; Training(weigh=...) says of what it is a weighed mean, '
        "if it is one"
    ]


def test_a_mean_is_of_micro_batches_and_needs_no_word():
    made, said = decision(OfLoss.DECIDE)
    made.came([Loss(loss=None, trail=[])])
    assert made.whole is None
    made.came([Loss(loss=None, trail=[], parts=[1.0, 2.0])])
    assert (made.whole, said) == (False, [])


@pytest.mark.parametrize(
    "left", [cut(filled=1), cut(batch=Batch((Along(X, dim=1),), {}, X)), cut(first_part=cut())]
)
def test_one_micro_batch_or_one_that_cannot_be_joined_decides_nothing(left):
    made, _ = decision(OfLoss.DECIDE)
    assert made.applied(left) is left


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (cut(batch=Batch((Along(X, dim=1),), {}, X)), "another dimension than its first"),
        (cut(first_part=cut()), "has a loss for each of its parts"),
    ],
)
def test_what_cannot_be_joined_has_no_loss_of_the_whole(wrong, words):
    made, _ = decision(OfLoss.WHOLE)
    with pytest.raises(ConfigError, match=words):
        made.applied(wrong)


def test_a_run_that_goes_on_keeps_what_was_decided_unless_the_script_says_it():
    for whole, kind in ((True, OfLoss.WHOLE), (False, OfLoss.PARTS), (None, OfLoss.DECIDE)):
        made, said = decision(OfLoss.DECIDE)
        made.resume(whole)
        assert (made.of_loss, said) == (kind, [])
    made, _ = decision(OfLoss.PARTS)
    made.resume(True)
    assert made.of_loss is OfLoss.PARTS


def test_a_loss_of_the_model_leaves_mini_batches_uncut():
    made, said = decision(OfLoss.DECIDE, own=True)
    whole = cut()
    assert made.applied(whole) is whole
    assert not made.leaves_uncut
    made.is_no_mean("it adds up", BATCH, told=False)
    assert made.leaves_uncut
    assert "No two workers compute at once" in said[0]


@pytest.mark.parametrize(
    ("of_loss", "batch", "told"),
    [
        (OfLoss.PARTS, BATCH, False),
        (OfLoss.DECIDE, BATCH, True),
        (OfLoss.DECIDE, Accumulated([BATCH, BATCH], of=2), False),
    ],
)
def test_where_it_cannot_be_left_uncut_by_itself_it_is_refused(of_loss, batch, told):
    made, _ = decision(of_loss, own=True)
    with pytest.raises(ConfigError, match='micro_batches=1, schedule="gpipe"'):
        made.is_no_mean("the loss is no mean", batch, told)
