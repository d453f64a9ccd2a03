"""Stages in this process, as the script meets them."""

import pytest
import torch
from support.inside import cluster
from support.models import regression
from support.small import small
from torch import nn

from pipedream_rt import ConfigError, PeerLost


@pytest.fixture
def pipe():
    with small() as made:
        yield made


def test_references_are_to_the_stages_themselves(pipe):
    list(pipe.train_epoch(regression(3)))
    pipe.flush()
    weight = pipe.stages[1].rref.local_value()[0].weight
    key = f"{pipe.stages[1].layers[0]}.weight"
    assert torch.equal(weight, pipe.state_dict()[key])
    assert pipe.stages[1].worker == "stage-1"


def test_a_copy_of_a_parameter_is_none_of_the_stage(pipe):
    """To change it changes nothing; what `local_value` returns is the parameter itself."""
    reference = cluster(pipe).parameter_references(0)[0]
    before = pipe.state_dict()["0.weight"].clone()
    copy = reference.to_here()
    assert (copy.requires_grad, reference.local_value().requires_grad) == (False, True)
    copy.zero_()
    assert torch.equal(pipe.state_dict()["0.weight"], before)
    assert reference.owner_name() == "stage-0"


def test_all_workers_have_the_clock_of_this_process_and_none_comes_or_is_lost(pipe):
    here = cluster(pipe)
    first, *others = here.clocks()
    assert others == [first, first]
    assert (first.offset, first.error) == (0, 0)
    assert here.clocks()[0].sent >= first.sent
    assert (here.newcomers(), here.status(), len(here.stories())) == (0, [], 3)
    error = PeerLost("it is gone", peer="stage-1")
    assert here.name_loss(error) is error


def test_settings_that_would_reach_the_stages_are_refused_while_they_are_changed(pipe):
    here = cluster(pipe)
    here.check_settings_unchanged()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(ConfigError, match="hook"):
            here.check_settings_unchanged()
    finally:
        handle.remove()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(ConfigError, match="default"):
            here.check_settings_unchanged()
    finally:
        torch.set_default_dtype(before)
    here.check_settings_unchanged()
