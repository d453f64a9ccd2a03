"""Random plans for property tests."""

from hypothesis import strategies as st

from pipedream_rt.schedules import RECIPES, plan_for

NEVER_FLUSHES = ("async-1f1b", "async-1f1b+vertical-sync", "2bw")
TAKES_SLACK = (*NEVER_FLUSHES, "1f1b")


def made(name, workers, k, v=2, slack=(), synchronous=0):
    """Return a plan with a schedule; k is raised to what it needs, the slack cut to the hops."""
    first = synchronous if name in NEVER_FLUSHES else 0
    if name in TAKES_SLACK:
        slack = [*slack, *[0] * workers][: workers - 1]
        k = max(k, workers + sum(slack)) if name == "2bw" else k
        return plan_for(name, num_stages=workers, per_update=k, slack=slack, synchronous=first)
    if name == "interleaved-1f1b":
        k = -(-k // workers) * workers
        return plan_for(name, num_stages=workers * v, per_update=k, stages_per_worker=v)
    return plan_for(name, num_stages=workers, per_update=k)


def replicated(most=3, most_replicas=4):
    """Return a strategy for plans with replicas."""

    def plan(name, replicas, k, slack, synchronous, shards):
        slack = slack[: len(replicas) - 1] if name != "gpipe" else ()
        slack = [*slack, *[0] * (len(replicas) - 1 - len(slack))]
        options = {
            "num_stages": len(replicas), "replicas": replicas, "slack": slack,
            "shard_optimizer": shards,
        }  # fmt: skip
        if name in NEVER_FLUSHES:
            options["synchronous"] = synchronous
        if name == "2bw":
            again = {**options, "synchronous": 0}
            k += plan_for("async-1f1b", **again).shape.longest_lag
        if shards and (synchronous or name not in NEVER_FLUSHES):
            k = max(k, *replicas)
        return plan_for(name, per_update=k, **options)

    return st.builds(
        plan,
        st.sampled_from([*TAKES_SLACK, "gpipe"]),
        st.lists(st.integers(1, most_replicas), min_size=1, max_size=most).filter(
            lambda counts: max(counts) > 1
        ),
        st.integers(1, 9),
        st.lists(st.integers(0, 3), max_size=most),
        st.sampled_from([0, 0, 1, 2]),
        st.booleans(),
    )


def schedules(names=tuple(RECIPES), most=7):
    """Return a strategy for plans: any built-in schedule and shape, and what else it takes."""
    return st.builds(
        made,
        st.sampled_from(list(names)),
        st.integers(1, most),
        st.integers(1, 9),
        st.integers(1, 4),
        st.lists(st.integers(0, 3), max_size=most),
        st.sampled_from([0, 0, 1, 2, 5]),
    )
