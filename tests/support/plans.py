"""Plans that differ in one thing from those of the built-in schedules."""

import dataclasses

from pipedream_rt.schedules import COORDINATOR, Action, Plan, plan_for


def in_script(name, stages=3, **options):
    """A plan whose loss the script computes."""
    return dataclasses.replace(plan_for(name, num_stages=stages, **options), loss_in_script=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listed(Plan):
    """A plan whose workers follow other orders."""

    orders: tuple[list[Action], ...]

    def order(self, worker, start=0, stop=None):
        if worker == COORDINATOR:
            return Plan.order(self, worker, start, stop)
        return iter(self.orders[worker])


class Unbounded(Listed):
    """One that states no bounds either."""

    def in_flight(self, stage):
        return 10**6

    def kept(self, stage):
        return 10**6

    def reads(self, stage, micro_batch):
        return 0


def listed(plan, *orders, kind=Listed):
    """A plan with other orders, each a list of actions or a text as ``F0 B0 S0``."""
    given = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan) if f.init}
    parsed = (map(Action.parse, o.split()) if isinstance(o, str) else o for o in orders)
    return kind(**given, orders=tuple(map(list, parsed)))
