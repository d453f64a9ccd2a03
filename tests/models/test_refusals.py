"""Refusals of layers and losses that would behave differently on stages."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipedream_rt.errors import ConfigError
from pipedream_rt.models.refusals import (
    refuse_loss,
    refuse_unfit_layers,
    shared_buffers,
    tensors_of,
)


def with_buffers(**buffers):
    layer = nn.Linear(2, 2)
    for name, buffer in buffers.items():
        layer.register_buffer(name, buffer)
    return layer


def refused(words, **layers):
    with pytest.raises(ConfigError, match=words):
        refuse_unfit_layers(layers)


def test_a_name_that_no_file_can_hold_is_refused():
    refused(r"^a\.x\\udce9 is a name .* no Unicode", a=with_buffers(**{"x\udce9": torch.ones(1)}))
    refuse_unfit_layers({"a": with_buffers(xé=torch.ones(1))})


def test_two_buffers_over_one_memory_are_refused():
    table = torch.zeros(4)
    words = r"a\.first and a\.all are two tensors over the same memory"
    refused(words, a=with_buffers(all=table, first=table[:2]))
    words = r"a\.all and b\.last are two tensors"
    refused(words, a=with_buffers(all=table), b=with_buffers(last=table[2:]))
    refused("two tensors", a=with_buffers(one=table.view(2, 2)[:, 0], all=table))


def test_what_shares_no_element_may_lie_in_one_memory():
    table = torch.zeros(4, 2)
    refuse_unfit_layers(
        {
            "columns": with_buffers(one=table[:, 0], other=table[:, 1]),
            "rows": with_buffers(one=torch.zeros(4)[:2], empty=torch.zeros(4)[:0]),
        }
    )


def test_one_tensor_may_have_several_names():
    layer, tied = nn.Linear(2, 2), nn.Linear(2, 2)
    tied.weight = layer.weight
    refuse_unfit_layers({"a": layer, "b": tied, "c": layer})


def test_what_has_no_shape_or_no_dense_memory_is_refused_by_name():
    refused(r"a\.weight has no shape yet", a=nn.LazyLinear(2))
    words = r"a\.graph is a tensor of layout torch.sparse_coo"
    refused(words, a=with_buffers(graph=torch.eye(2).to_sparse()))


def test_a_wrapped_model_is_refused():
    torch.distributed.init_process_group(
        "gloo", rank=0, world_size=1, store=torch.distributed.HashStore()
    )
    try:
        wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        words = r"the model is wrapped in DistributedData.*give model\.module"
        with pytest.raises(ConfigError, match=words):
            refuse_unfit_layers({"": wrapped})
    finally:
        torch.distributed.destroy_process_group()


def test_a_loss_is_something_to_call():
    for loss in (None, F.mse_loss, nn.MSELoss()):
        refuse_loss(loss)
    with pytest.raises(ConfigError, match=r"the class MSELoss; give an instance, MSELoss\(\)"):
        refuse_loss(nn.MSELoss)
    with pytest.raises(ConfigError, match="loss_fn must be callable, not 3"):
        refuse_loss(3)


def test_tensors_have_their_names_in_the_unsplit_model():
    names = [name for name, _ in tensors_of(with_buffers(table=torch.ones(1)), "blocks.3")]
    assert names == ["blocks.3.weight", "blocks.3.bias", "blocks.3.table"]


def test_a_buffer_is_shared_where_it_is_on_two_stages():
    """Not where one stage has it twice, nor where two have equal ones."""
    table, twice = torch.ones(2), torch.ones(2)
    parts = [
        nn.ModuleDict({"a": with_buffers(table=table), "b": with_buffers(own=torch.ones(2))}),
        nn.ModuleDict({"c": with_buffers(twice=twice), "d": with_buffers(again=twice)}),
        nn.ModuleDict({"e": with_buffers(other=table, own=torch.ones(2))}),
    ]
    assert shared_buffers(parts) == [("a.table",), (), ("e.other",)]
