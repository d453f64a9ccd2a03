"""What a pipeline tells its workers, for tests without a pipeline."""

from datetime import timedelta

from pipedream_rt.cluster.interface import ClusterSpec
from pipedream_rt.job.process_assignment import ProcessAssignment
from pipedream_rt.schedules import Plan, Shape

from .deadlines import LATEST_S


def spec(count, assignment=None, heartbeat=LATEST_S, fail=print, per_worker=1, **more):
    """A plan of so many workers, each a process if nothing else is said."""
    return ClusterSpec(
        plan=Plan(name="", shape=Shape(workers=count, stages_per_worker=per_worker)),
        assignment=assignment or ProcessAssignment(fewest=count, most=count),
        receive=print,
        fail=fail,
        generation=1,
        timeout=timedelta(seconds=LATEST_S),
        start_timeout=timedelta(seconds=LATEST_S),
        heartbeat=timedelta(seconds=heartbeat),
        threads=1,
        **more,
    )
