"""The words of other trainers: each is answered with what to write here."""

import inspect
import re

import pytest
from torch import nn

import pipedream_rt
from pipedream_rt import Checkpoints, ConfigError, Layout, Recovery, Training, UnknownOption
from pipedream_rt.job.words import MEANINGS


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("amp", "give training=Training(autocast=torch.bfloat16)"),
        ("bf16", "give training=Training(autocast=torch.bfloat16)"),
        ("gradient_accumulation_steps", "cut them by micro_batches="),
        ("accumulate_grad_batches", "cut them by micro_batches="),
        ("epochs", "the script has the loop"),
        ("max_steps", "which a break ends"),
        ("world_size", "give stages=, their number"),
        ("max_grad_norm", "training=Training(clip=Clip(1.0))"),
        ("clip", "training=Training(clip=Clip(1.0))"),
        ("balance", "as stages=[3, 5]"),
        ("chunks", "give micro_batches="),
        ("Batch-Size", "DataLoader(dataset, batch_size=...)"),
    ],
)
def test_a_word_of_others_is_answered_with_what_to_write(word, answer):
    with pytest.raises(UnknownOption) as e:
        pipedream_rt.Pipeline(nn.Linear(1, 1), **{word: 1})
    assert str(e.value).startswith(f"Pipeline has no option {word!r}; ")
    assert answer in str(e.value)


def test_no_word_of_others_is_an_option_here():
    """But for `clip` and `loss`, which an option group has, and takes other values for."""
    owners = (pipedream_rt.Pipeline, Training, Layout, Recovery, Checkpoints, pipedream_rt.Observe)
    names = {name for owner in owners for name in inspect.signature(owner).parameters}
    assert {*MEANINGS} & names == {"clip", "loss"}
    # What an answer names is there.
    for said in MEANINGS.values():
        for option in re.findall(r"(\w+)=(?:Training|Layout|Checkpoints|Observe)\(", said):
            assert option in names
    with pytest.raises(ConfigError, match=r"clip must be Clip\(1.5\), not 1.5"):
        Training(clip=1.5)
