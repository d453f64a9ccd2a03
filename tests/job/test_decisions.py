"""What is decided of a run, from what its model says: nothing is packed and nothing starts."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.models import mlp
from torch import nn

from pipedream_rt import ConfigError, Layout, Recovery, Training
from pipedream_rt.job.decisions import decide
from pipedream_rt.job.options import Options
from pipedream_rt.job.reading import read_model, requested
from pipedream_rt.job.unsplit_model import UnsplitModel
from pipedream_rt.messages.head import OfLoss

NADAM = (torch.optim.NAdam, {"lr": 0.1})
ADAM = (torch.optim.Adam, {"lr": 0.1})


def read(model=None, **given):
    given = {"stages": 2, "loss_fn": F.mse_loss, "optimizer": ADAM, "workers": "serial", **given}
    options = Options(**given)
    unsplit = UnsplitModel(mlp() if model is None else model, options.loss_fn)
    return read_model(requested(unsplit, options)), options


def decided(model=None, starts_here=True, **given):
    return decide(*read(model, **given), starts_here)


def table(**options):
    return nn.Sequential(nn.Embedding(9, 4, **options), *(nn.Linear(4, 4) for _ in range(3)))


def test_what_was_left_out_is_chosen_and_what_was_given_stays():
    made = decided(optimizer=NADAM, stages=4)
    assert made.options.schedule == "async-1f1b"
    assert made.left_out.schedule
    assert made.left_out.micro_batches
    assert made.options.micro_batches == made.plan.per_update
    made = decided(optimizer=NADAM, schedule="gpipe", micro_batches=3)
    assert (made.plan.name, made.plan.per_update) == ("gpipe", 3)
    assert not made.left_out.schedule
    assert not made.left_out.micro_batches


def test_a_schedule_that_other_options_refuse_gives_way_to_one_that_flushes():
    assert decided(table(), optimizer=NADAM, stages=4).options.schedule == "async-1f1b"
    made = decided(table(max_norm=1.0), optimizer=NADAM, stages=4)
    assert made.options.schedule == "1f1b"
    with pytest.raises(ConfigError, match="max_norm"):
        decided(table(max_norm=1.0), optimizer=NADAM, schedule="async-1f1b")


def test_one_reading_serves_any_number_of_decisions():
    reading, options = read(optimizer=NADAM)
    before = {name: getattr(reading, name) for name in ("split", "optimizer", "loss_fn")}
    plans = [decide(reading, replace(options, schedule=each)).plan for each in ("1f1b", "gpipe")]
    assert [plan.name for plan in plans] == ["1f1b", "gpipe"]
    again = decide(reading, replace(options, schedule="1f1b"))
    assert again.plan == plans[0]
    assert all(getattr(reading, name) is value for name, value in before.items())


def test_corrections_belong_to_what_is_known_of_the_run():
    made = decided(optimizer=(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), schedule="async-1f1b",
                   corrections="auto", micro_batches=1)  # fmt: skip
    assert made.corrections
    assert made.corrections is made.facts.corrections
    assert decided(schedule="1f1b").corrections == ()


def test_of_one_micro_batch_a_loss_is_of_its_parts():
    whole = Training(loss="whole")
    assert decided(training=whole, schedule="gpipe", micro_batches=1).of_loss is OfLoss.PARTS
    assert decided(training=whole, schedule="gpipe", micro_batches=2).of_loss is OfLoss.WHOLE


class OwnLoss(nn.Module):
    """Computes its loss itself."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return {"loss": self.second(self.first(x)).square().mean()}


def test_a_loss_that_the_model_computes_itself_is_of_no_whole_but_that_of_one_micro_batch():
    given = {"loss_fn": None, "example": torch.ones(4, 4), "schedule": "gpipe"}
    given["training"] = Training(loss="whole")
    assert decided(OwnLoss(), micro_batches=1, **given).of_loss is OfLoss.PARTS
    for count in (None, 2):
        with pytest.raises(ConfigError, match="this model computes its loss itself: give micro_b"):
            decided(OwnLoss(), micro_batches=count, **given)


def test_stages_that_compute_again_are_numbered():
    assert decided(training=Training(recompute=[1])).recompute == {1}
    assert decided(training=Training(recompute=True)).recompute == {0, 1}
    with pytest.raises(ConfigError, match="recompute must be"):
        decided(training=Training(recompute=[2]))


def test_a_number_of_processes_needs_processes():
    with pytest.raises(ConfigError, match='workers="serial" has none'):
        decided(recovery=Recovery(elastic=(1, 2)))
    made = decided(recovery=Recovery(elastic=(1, 2)), workers="local")
    assert (made.assignment.fewest, made.assignment.most) == (1, 2)


def test_what_does_not_go_together_is_refused():
    sparse = table(sparse=True)
    with pytest.raises(ConfigError, match="are sparse"):
        decided(sparse, schedule="1f1b", micro_batches=2, layout=Layout(replicas=2))


def test_workers_elsewhere_take_the_settings_of_accelerators_too():
    here, elsewhere = decided(), decided(starts_here=False, workers="localhost:1")
    assert here.devices == elsewhere.devices == ()
    assert len(elsewhere.settings) > len(here.settings)
