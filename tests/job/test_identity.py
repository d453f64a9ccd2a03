"""What a script that resumes must give again: what is refused, told, and accepted by name."""

import dataclasses
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from support.deadlines import LATEST_S
from torch import nn

from pipedream_rt import CheckpointError, Checkpoints, ConfigError
from pipedream_rt.codecs import BFloat16
from pipedream_rt.corrections import ErrorFeedback
from pipedream_rt.job.identity import ACCEPTABLE, Identity, name_of_loss, names_of

SAVED = Identity(
    seed=0,
    optimizer="torch.optim.adamw.AdamW",
    groups=[["0.weight"], ["0.bias", "1.bias"]],
    hyper_parameters=[{"lr": 0.1, "eps": 1e-8}, {"lr": 0.2}],
    loss="torch.nn.functional.mse_loss 01234567",
    schedule="async-1f1b",
    corrections=["ErrorFeedback(limit=1.0)"],
    codecs=["Int8()"],
)
REFUSED = [
    ("seed", 4, "the seed 0, this script has 4: the random numbers of layers would be others"),
    ("optimizer", "torch.optim.sgd.SGD", "the optimizer 'torch.optim.adamw.AdamW', this script"),
    ("groups", [["0.weight", "0.bias", "1.bias"]], "of [1, 2] parameters, this script has those"),
]
TOLD = [
    ("loss", "other", "this script has 'other': the run goes on with the loss of the script"),
    (
        "hyper_parameters",
        [{"lr": 0.1, "eps": 1e-8}, {"lr": 0.5}],
        "hyper-parameters lr = 0.2 in group 1, this script has lr = 0.5 in group 1: the run goes "
        "on with those of the checkpoint; accept=['hyper_parameters'] takes those of the script",
    ),
    ("schedule", "1f1b", "the schedule 'async-1f1b', this script has '1f1b'"),
    ("corrections", [], "['ErrorFeedback(limit=1.0)'], this script has []"),
    ("codecs", [], "['Int8()'], this script has []"),
    ("threads", 2, "the threads 1, this script has 2: the bits may be others"),
    ("torch", "1.0", "this script has '1.0': the bits may be others; accept=['torch'] ends"),
]


def compare(accept=(), saved=None, **changes):
    saved = SAVED.plain() if saved is None else saved
    dataclasses.replace(SAVED, **changes).compare(saved, "step-7", accept)


def test_every_part_of_an_identity_has_its_case_and_can_be_accepted():
    names = {field.name for field in dataclasses.fields(Identity)}
    assert names == {*ACCEPTABLE} - {"values"} == {case[0] for case in REFUSED + TOLD}


def test_the_same_script_goes_on_without_a_word(caplog):
    compare()
    assert not caplog.records


@pytest.mark.parametrize(("name", "value", "words"), REFUSED, ids=[case[0] for case in REFUSED])
def test_what_changes_results_is_refused_unless_it_is_accepted(caplog, name, value, words):
    with pytest.raises(CheckpointError, match=re.escape(words)) as caught:
        compare(**{name: value})
    assert str(caught.value).startswith("step-7 was made with the ")
    assert f"load(..., accept=['{name}'])" in str(caught.value)
    compare([name], **{name: value})
    assert not caplog.records


@pytest.mark.parametrize(("name", "value", "words"), TOLD, ids=[case[0] for case in TOLD])
def test_what_else_is_different_is_told_unless_it_is_accepted(caplog, name, value, words):
    compare(**{name: value})
    (record,) = caplog.records
    assert words in record.getMessage()
    compare([name], **{name: value})
    assert len(caplog.records) == 1


def test_what_an_older_checkpoint_did_not_save_is_not_compared(caplog):
    older = {name: value for name, value in SAVED.plain().items() if name != "seed"}
    compare(saved=older, seed=4)
    assert not caplog.records


def test_a_class_of_the_script_is_the_same_where_the_script_is_imported():
    saved = {**SAVED.plain(), "optimizer": "__main__.Own"}
    compare(saved=saved, optimizer="train.Own")
    with pytest.raises(CheckpointError, match="its state is of another kind"):
        compare(saved=saved, optimizer="train.Other")


class Quiet:
    """Prints its address."""

    def __init__(self, factor):
        self.factor, self.table = factor, torch.full((2,), float(factor))


def test_things_are_named_by_what_they_print_or_by_their_class_and_values():
    assert names_of([BFloat16(), ErrorFeedback()]) == [
        repr(BFloat16()),
        "ErrorFeedback(limit=1.0)",
    ]
    one, same, other = names_of([Quiet(1), Quiet(1), Quiet(2)])
    assert one == same != other
    assert one.startswith(f"{__name__}.Quiet ")


def test_a_loss_has_another_name_where_its_closure_or_a_default_is_another():
    def made(factor, shift):
        def loss(output, target, by=shift):
            return factor * (output - target + by)

        return loss

    names = [name_of_loss(made(*values)) for values in ((1, 2), (1, 2), (3, 2), (1, 3))]
    assert names[0] == names[1]
    assert len(set(names)) == 3


class Called:
    def __call__(self, output, target):
        return F.mse_loss(output, target)


def test_the_same_loss_has_the_same_name_in_another_process():
    """And another one has another: the name of a function is not enough of it."""
    code = (
        "import functools, torch.nn.functional as F; from torch import nn\n"
        "from pipedream_rt.job.identity import name_of_loss\n"
        "def f(o, t):\n    return 2 * F.mse_loss(o, t) if 'a' in {'a', 'b'} else None\n"
        "for loss in (f, lambda o, t: f(o, t), functools.partial(f, t=len), nn.MSELoss(),\n"
        "             F.mse_loss, None):\n    print(name_of_loss(loss))"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True, text=True, timeout=LATEST_S, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(runs) == 1
    assert len({*runs.pop().splitlines()}) == 6
    assert name_of_loss(lambda o, t: 2 * o) != name_of_loss(lambda o, t: 3 * o)
    assert ".Called " in name_of_loss(Called())
    others = [nn.MSELoss(), nn.MSELoss(reduction="sum"), nn.CrossEntropyLoss(weight=torch.ones(3))]
    assert len({*map(name_of_loss, others)}) == 3


def test_what_can_be_accepted_is_a_list_of_names():
    for wrong in ("everything", ["seed", "sed"], 3):
        with pytest.raises(ConfigError, match="accept is a list of what may differ"):
            Checkpoints("run", accept=wrong)
