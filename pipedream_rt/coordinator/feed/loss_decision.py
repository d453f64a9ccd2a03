"""What the loss of a mini-batch is computed of, as the job says or the first one decides."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from pipedream_rt.batches.cutting import is_cut_elsewhere
from pipedream_rt.batches.items import Accumulated, Batch
from pipedream_rt.batches.micro_batches import CutBatch
from pipedream_rt.errors import ConfigError
from pipedream_rt.job.notices import about_whole_loss
from pipedream_rt.messages.head import OfLoss
from pipedream_rt.messages.message import Loss
from pipedream_rt.stage.loss_check import refuse_own_loss
from pipedream_rt.telling import log_of, note

_log = log_of(__name__)

ELSEWHERE = (
    "a value of the mini-batch is cut along another dimension than its first, and outputs are "
    'joined along their first one for the loss: give micro_batches=1, schedule="gpipe", or inputs '
    "with the samples first"
)
"""The error about a mini-batch whose outputs cannot be joined."""


class LossDecision:
    """The decision what the loss is computed of.

    Attributes:
        of_loss: The decision so far.
        announce: Called with the decision of the first mini-batch, in words.

    ``own``: whether the model computes the loss itself, from its inputs.
    """

    def __init__(self, of_loss: OfLoss, own: bool) -> None:
        self.of_loss, self._own = of_loss, own
        self.announce: Callable[[str], object] = functools.partial(note, _log)

    @property
    def whole(self) -> bool | None:
        """Whether the loss is computed of whole mini-batches; None if that is not decided."""
        return {OfLoss.WHOLE: True, OfLoss.PARTS: False}.get(self.of_loss)

    def resume(self, whole: bool | None) -> None:
        """Take over the decision of a run's first mini-batch, unless the script has decided."""
        if self.of_loss is OfLoss.DECIDE and whole is not None:
            self.of_loss = OfLoss.WHOLE if whole else OfLoss.PARTS

    @property
    def leaves_uncut(self) -> bool:
        """Whether the model gets mini-batches whole, because it computes the loss of them."""
        return self._own and self.of_loss is OfLoss.WHOLE

    def applied(self, cut: CutBatch) -> CutBatch:
        """Return a mini-batch that says what its loss is computed of."""
        if self.of_loss is cut.parts[0].loss or len(cut.filled) < 2 or self._own:
            return cut
        elsewhere = self.of_loss is not OfLoss.PARTS and is_cut_elsewhere(cut.batch)
        if self.of_loss is OfLoss.DECIDE and (elsewhere or cut.first_part is not None):
            return cut
        if cut.first_part is not None:
            raise ConfigError(
                "an accumulated mini-batch has a loss for each of its parts, and Training(loss="
                '"whole") computes one of all samples: leave that out, or give whole mini-batches'
            )
        if elsewhere:
            raise ConfigError(ELSEWHERE)
        return cut._replace(parts=[part._replace(loss=self.of_loss) for part in cut.parts])

    def came(self, taken: Sequence[Loss]) -> None:
        """Take the decision of the last stage from a mini-batch's losses, if it was to decide."""
        if self.of_loss is OfLoss.DECIDE and any(each.parts or each.whole for each in taken):
            self._decide(next((each.whole for each in taken if each.whole), ""))

    def is_no_mean(self, why: str, batch: Batch | Accumulated, told: bool) -> None:
        """Leave mini-batches whole from now on, as the model's own loss is no mean; or refuse it.

        ``told``: whether the losses of micro-batches only add up.
        """
        if self.of_loss is not OfLoss.DECIDE or told or not isinstance(batch, Batch):
            refuse_own_loss(why)
        self._decide(why)

    def _decide(self, why: str) -> None:
        self.of_loss = OfLoss.WHOLE if why else OfLoss.PARTS
        if why:
            self.announce(about_whole_loss(why, cut=not self._own))
