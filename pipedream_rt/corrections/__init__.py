"""Corrections for staleness: what a stage may do about gradients that are older than its weights.

They are given to ``Pipeline(corrections=[...])`` and applied in that order.
"""

from pipedream_rt.corrections.gradients import DelayCompensation, ErrorFeedback
from pipedream_rt.corrections.nesterov import StalenessNesterov
from pipedream_rt.corrections.prediction import Extrapolation, WeightPrediction
from pipedream_rt.corrections.rates import (
    StalenessDamping,
    StalenessMomentum,
    StalenessRate,
    StalenessRefresh,
)
from pipedream_rt.stage.correction import Correction, Moment

__all__ = [
    "Correction",
    "DelayCompensation",
    "ErrorFeedback",
    "Extrapolation",
    "Moment",
    "StalenessDamping",
    "StalenessMomentum",
    "StalenessNesterov",
    "StalenessRate",
    "StalenessRefresh",
    "WeightPrediction",
]
