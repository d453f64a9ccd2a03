"""Random schedules for property tests."""

from hypothesis import strategies as st

from pipedream_rt.schedules import RECIPES, plan_named


def made(name, workers, k, v=2):
    """A schedule of that name; k is raised to what it needs."""
    if name == "interleaved-1f1b":
        k = -(-k // workers) * workers
        return plan_named(name, num_stages=workers * v, per_update=k, stages_per_worker=v)
    return plan_named(name, num_stages=workers, per_update=max(k, workers) if name == "2bw" else k)


def schedules(names=tuple(RECIPES), most=7):
    """Any built-in schedule in any shape."""
    return st.builds(
        made,
        st.sampled_from(list(names)),
        st.integers(1, most),
        st.integers(1, 9),
        st.integers(1, 4),
    )
