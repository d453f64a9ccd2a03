"""What each stage does, in which order, reading which weight version. Pure: integers only."""

from pipedream_rt.schedules.actions import Action, Kind
from pipedream_rt.schedules.checker import check
from pipedream_rt.schedules.ledger import VersionLedger
from pipedream_rt.schedules.schedule import RECIPES, Schedule, schedule_named

__all__ = ["RECIPES", "Action", "Kind", "Schedule", "VersionLedger", "check", "schedule_named"]
