"""What each stage does, in which order, reading which weight version. Pure: integers only."""

from pipedream_rt.schedules.actions import Action, Kind
from pipedream_rt.schedules.checker import check, schedule_for
from pipedream_rt.schedules.ledger import VersionLedger
from pipedream_rt.schedules.orders import Order
from pipedream_rt.schedules.policies import VersionPolicy
from pipedream_rt.schedules.schedule import (
    RECIPES,
    Schedule,
    describe_schedules,
    schedule_named,
)
from pipedream_rt.schedules.shape import Shape

__all__ = [
    "RECIPES",
    "Action",
    "Kind",
    "Order",
    "Schedule",
    "Shape",
    "VersionLedger",
    "VersionPolicy",
    "check",
    "describe_schedules",
    "schedule_for",
    "schedule_named",
]
