"""Schedules: the order of each worker's actions, and the weight version that each one reads.

Everything here is pure: integers, without clocks, messages, tensors or threads.
"""

from pipedream_rt.schedules.actions import Action, Kind
from pipedream_rt.schedules.channels import CHANNELS
from pipedream_rt.schedules.checker import check, plan_for
from pipedream_rt.schedules.edges import COORDINATOR, Edge, EdgeKind, Need
from pipedream_rt.schedules.ledger import VersionLedger
from pipedream_rt.schedules.orders import Order
from pipedream_rt.schedules.plan import Plan
from pipedream_rt.schedules.policies import VersionPolicy
from pipedream_rt.schedules.recipes import (
    RECIPES,
    Recipe,
    describe_schedules,
    schedule_named,
)
from pipedream_rt.schedules.shape import Shape

__all__ = [
    "CHANNELS",
    "COORDINATOR",
    "RECIPES",
    "Action",
    "Edge",
    "EdgeKind",
    "Kind",
    "Need",
    "Order",
    "Plan",
    "Recipe",
    "Shape",
    "VersionLedger",
    "VersionPolicy",
    "check",
    "describe_schedules",
    "plan_for",
    "schedule_named",
]
