"""The words of other trainers: each is answered with what to write here."""

import inspect
import re

import pytest
from torch import nn

import pipedream_rt
from pipedream_rt import Checkpoints, ConfigError, Layout, Recovery, Training, UnknownOption
from pipedream_rt.job.words import MEANINGS


@pytest.mark.parametrize("word", ["amp", "clip", "Batch-Size"])
def test_a_word_of_others_is_answered_with_what_to_write(word):
    with pytest.raises(UnknownOption) as e:
        pipedream_rt.Pipeline(nn.Linear(1, 1), **{word: 1})
    assert str(e.value).startswith(f"Pipeline has no option {word!r}; ")
    assert MEANINGS[word.lower().replace("-", "_")] in str(e.value)


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
