"""The scales of losses, as torch.amp.GradScaler has them."""

import pytest
import torch

from pipedream_rt import plan_for
from pipedream_rt.stage.scaling import LossScale, Scaler

FOUND = [False, False, True, False, False, False, True, True, False, False, False, False]


@pytest.mark.parametrize(
    "given",
    [
        {"init_scale": 65536.0, "growth_interval": 2},
        {"init_scale": 3.3, "growth_interval": 3, "growth_factor": 1.7, "backoff_factor": 0.3},
        {"init_scale": 1e38, "growth_interval": 1, "growth_factor": 10.0},  # would be infinite
    ],
)
def test_a_scale_moves_as_torchs_does(given):
    scaler = Scaler(LossScale(**given), plan_for("1f1b", num_stages=2, per_update=1))
    scale, tracker = torch.tensor(given["init_scale"]), torch.tensor(0, dtype=torch.int32)
    options = LossScale(**given)
    for update, skipped in enumerate(FOUND):
        assert scaler.of_update(update) == scale.item()
        torch._amp_update_scale_(
            scale, tracker, torch.tensor(float(skipped)), options.growth_factor,
            options.backoff_factor, options.growth_interval,
        )  # fmt: skip
        scaler.learn(update, not skipped)
        assert scaler.skips(update) == skipped
    assert scaler.skipped == sum(FOUND)


def test_a_scaler_goes_on_from_a_checkpoint():
    plan = plan_for("1f1b", num_stages=2, per_update=1)
    whole = Scaler(LossScale(growth_interval=2), plan)
    for update, skipped in enumerate(FOUND[:6]):
        whole.learn(update, not skipped)
    saved = whole.state()
    again = Scaler(LossScale(growth_interval=2), plan)
    again.load(saved, 5)
    for update, skipped in enumerate(FOUND):
        for each in (whole, again):
            each.learn(update, not skipped)  # what is known already is not noted again
    assert again.state()[-1] == whole.state()[-1]
