"""Which corrections are chosen for an optimizer, and where."""

import pytest
import torch
import torch.nn.functional as F
from support.models import mlp, regression
from support.pinned import Flat as Pipeline

from pipedream_rt.corrections import (
    ErrorFeedback,
    Extrapolation,
    StalenessDamping,
    StalenessNesterov,
    advice,
)
from pipedream_rt.optimizers import Muon, hidden_matrices


def open_pipe(optimizer, **options):
    defaults = {"stages": 3, "loss_fn": F.mse_loss, "workers": "serial", "corrections": "auto"}
    return Pipeline(mlp(), optimizer=optimizer, **{**defaults, **options})


MUON = (Muon, {"lr": 0.01}, [(hidden_matrices(mlp()), {"matrices": True})])


def test_the_table_rises_and_makes_new_corrections_each_time():
    for name in {row.optimizer for row in advice.TABLE}:
        rows = [row for row in advice.TABLE if row.optimizer == name]
        assert [row.most for row in rows] == sorted({row.most for row in rows})
        for row in rows:
            assert row.slowdown <= row.plain
            made = row.make()
            assert all(a is not b for a, b in zip(made, row.make(), strict=True))


def test_it_is_chosen_by_optimizer_and_staleness():
    with open_pipe(MUON, schedule="2bw", micro_batches=4) as pipe:
        applied = "corrections: ErrorFeedback(limit=1.0), Extrapolation(strength=1.0, decay=0.0)"
        assert applied in pipe.explain()
        list(pipe.train_epoch(regression(4)))
    with open_pipe([*MUON], schedule="2bw", micro_batches=4) as pipe:  # a list does as well
        assert "corrections: ErrorFeedback" in pipe.explain()
    with open_pipe(MUON, schedule="1f1b", micro_batches=4) as pipe:
        assert "corrections" not in pipe.explain()
    with open_pipe((torch.optim.Adagrad, {"lr": 0.01})) as pipe:
        assert "corrections" not in pipe.explain()
    with open_pipe(None) as pipe:
        assert "corrections" not in pipe.explain()


def test_a_chosen_correction_gives_the_bits_of_the_same_by_hand():
    states = []
    for corrections in ("auto", [ErrorFeedback(), Extrapolation()]):
        options = {"schedule": "2bw", "micro_batches": 4, "corrections": corrections}
        with open_pipe(MUON, **options) as pipe:
            list(pipe.train_epoch(regression(6)))
            states.append(pipe.state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_an_optimizer_without_momentum_gets_none():
    """Nor one that looks ahead by itself, nor one that is not known, nor where nothing is stale."""

    class Own(torch.optim.SGD):
        pass

    def chosen(optimizer, staleness=1, **group):
        return [type(each) for each in advice.advised(optimizer, [group], staleness)]

    class Stepping(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    both, shorter = [ErrorFeedback, Extrapolation], [StalenessNesterov]
    staler = [*both, StalenessDamping]
    assert chosen(torch.optim.SGD, momentum=0.9) == shorter
    assert chosen(Own, momentum=0.9) == shorter
    assert chosen(Stepping, momentum=0.9) == []  # nobody knows what its step does
    assert chosen(torch.optim.SGD, momentum=0.9, nesterov=True) == []
    assert chosen(torch.optim.AdamW) == chosen(torch.optim.Adam, betas=(0.9, 0.99)) == shorter
    assert chosen(torch.optim.SGD) == chosen(torch.optim.Adam, betas=(0.0, 0.99)) == []
    assert chosen(torch.optim.AdamW, staleness=0) == []
    assert chosen(torch.optim.AdamW, staleness=2) == chosen(torch.optim.Adam, staleness=9) == staler
    assert chosen(Muon) == chosen(torch.optim.Muon, momentum=0.9) == both
    assert chosen(Muon, momentum=0.0) == chosen(torch.optim.Muon, momentum=0.0) == []
    assert chosen(Muon, matrices=True, betas=(0.0, 0.99)) == []  # the AdamW beside it has none
    groups = [{"momentum": 0.9}, {"momentum": 0.0}]
    assert advice.advised(torch.optim.SGD, groups, 1) == []
    for name in ("NAdam", "RMSprop", "Adagrad", "Adafactor", "Adadelta", "RAdam"):
        assert chosen(getattr(torch.optim, name)) == []
        assert chosen(getattr(torch.optim, name), staleness=3) == []
    assert chosen(type("AdamW", (torch.optim.Optimizer,), {})) == []
    assert chosen(None) == []


def test_any_other_text_is_refused():
    with pytest.raises(Exception, match='must be "auto" or a list'):
        open_pipe(MUON, corrections="all")
