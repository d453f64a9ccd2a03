"""Simulations: a plan and its costs give the trace of a run, without workers."""

from pipedream_rt.simulation.costs import Costs, costs_of
from pipedream_rt.simulation.predict import Prediction, fit, predict, what_if
from pipedream_rt.simulation.simulator import simulate

__all__ = ["Costs", "Prediction", "costs_of", "fit", "predict", "simulate", "what_if"]
