"""What a rule of a stage is given, without a stage."""

from pipedream_rt.stage.rules.rule import Context
from pipedream_rt.stage.weights import Weights


def context(module, plan, stage=0, address=None, names=None):
    """Return the context of a rule for a module with the names of the unsplit model."""
    address = plan.addresses[plan.address_of(stage) if address is None else address]
    weights = Weights(module, plan, stage, address, (), names or {})
    numbers = {name: i for i, name in enumerate(weights.own.named)}
    return Context(plan=plan, stage=stage, address=address, weights=weights, numbers=numbers)
