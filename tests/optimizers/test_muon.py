"""`Muon` against torch's own beside AdamW, and the matrices that it is for."""

import torch
from support.matrices import MatrixModel, grouped, model, trained
from torch import nn

from pipedream_rt.optimizers import Muon, hidden_matrices


def test_the_matrices_inside_a_model():
    rule = hidden_matrices(model())
    names = [name for name, p in model().named_parameters() if rule(name, p)]
    assert names == [
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "up.weight",
        "down.weight",
    ]
    tied = MatrixModel(tied=True)
    assert not hidden_matrices(tied)("embedding.weight", tied.embedding.weight)


def test_muon_is_that_of_torch_beside_adamw():
    net = model()
    inside, others = grouped(net)
    optimizer = Muon(
        [{"params": inside, "matrices": True}, {"params": others}],
        lr=0.01, momentum=0.9, betas=(0.8, 0.9), weight_decay=0.1,
    )  # fmt: skip
    found = trained(net, optimizer.step)
    net = model()
    inside, others = grouped(net)
    one = torch.optim.Muon(
        inside, lr=0.01, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    other = torch.optim.AdamW(others, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1, foreach=False)

    def step():
        one.step()
        other.step()

    expected = trained(net, step)
    assert all(map(torch.equal, found, expected))


def test_the_matrices_of_a_list_of_layers():
    layers = [nn.Linear(4, 4) for _ in range(3)]
    rule = hidden_matrices(layers)
    assert [rule(f"{i}.weight", layer.weight) for i, layer in enumerate(layers)] == [1, 1, 0]
