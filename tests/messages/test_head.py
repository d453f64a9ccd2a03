"""Which modes leave no trace, and which compute a loss."""

import pytest

from pipedream_rt.messages.head import WITH_LOSS, Mode


@pytest.mark.parametrize("mode", Mode)
def test_a_recovery_repeats_what_may_have_changed_weights_or_buffers(mode):
    changes = mode in (Mode.TRAIN, Mode.EVALUATE_AND_KEEP, Mode.INFER_IN_TRAINING_MODE)
    assert mode.leaves_no_trace != changes


def test_who_computes_a_loss_evaluates_unless_it_trains():
    assert [mode for mode in WITH_LOSS if not mode.evaluates] == [Mode.TRAIN]
    assert [mode for mode in Mode if mode.evaluates and mode not in WITH_LOSS] == []
