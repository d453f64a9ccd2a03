"""What the last stage computes the loss of."""

from __future__ import annotations

from enum import Enum


class OfLoss(Enum):
    """What the last stage computes the loss of."""

    PARTS = "of each micro-batch"
    WHOLE = "of the whole mini-batch"
    DECIDE = "of the whole, unless it is a weighed mean of those of micro-batches"
