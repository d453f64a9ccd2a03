"""The version policies: which version a forward reads, and how many are kept."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.shapes import made, schedules

from pipedream_rt.errors import ConfigError
from pipedream_rt.schedules import Kind, plan_for
from pipedream_rt.schedules.policies import TwoVersions, VerticalSync, WeightStashing
from pipedream_rt.schedules.shape import Shape


@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_weight_stashing_reads_what_its_own_order_has_made(num_stages, per_update, data):
    """The formula of the table is the number of updates before the forward, in the order."""
    schedule = plan_for("async-1f1b", num_stages=num_stages, per_update=per_update)
    stage = data.draw(st.integers(0, num_stages - 1))
    updates = 0
    for action in itertools.islice(schedule.order(stage), 120):
        if action.kind is Kind.STEP:
            updates += 1
        elif action.kind is Kind.FORWARD:
            assert schedule.reads(stage, action.index) == updates


@given(schedules(), st.integers(0, 50), st.data())
def test_the_version_read_never_falls(schedule, m, data):
    stage = data.draw(st.integers(0, schedule.num_stages - 1))
    assert schedule.reads(stage, m) <= schedule.reads(stage, m + 1) <= m + 1


def test_the_table_of_versions():
    """The table of docs/concepts/schedules.md."""
    n, k = 4, 5
    for m in range(60):
        for s in range(n):
            assert made("async-1f1b", n, k).reads(s, m) == max(0, (m - (n - 1 - s)) // k)
            assert made("async-1f1b+vertical-sync", n, k).reads(s, m) == max(0, (m - (n - 1)) // k)
            assert made("2bw", n, k).reads(s, m) == max(0, m // k - 1)
            for name in ("1f1b", "gpipe", "zero-bubble", "interleaved-1f1b"):
                schedule = made(name, n, k)
                assert schedule.reads(s, m) == m // schedule.per_update
    assert [made("async-1f1b", n, 1).kept(s) for s in range(n)] == [4, 3, 2, 1]
    assert [made("async-1f1b+vertical-sync", n, 1).kept(s) for s in range(n)] == [4] * 4
    assert [made("2bw", n, k).kept(s) for s in range(n)] == [2] * 4


ASYNCHRONOUS = [WeightStashing(), VerticalSync(), TwoVersions()]
POLICY = pytest.mark.parametrize("policy", ASYNCHRONOUS, ids=lambda p: type(p).__name__)


@POLICY
def test_synchronous_updates_read_the_newest_version(policy):
    """And none after them reads an older one than the last of them made."""
    shape = Shape(workers=3, per_update=4, synchronous=2)
    for stage in range(3):
        reads = [policy.reads(stage, shape, m) for m in range(40)]
        assert reads[:8] == [0] * 4 + [1] * 4
        assert min(reads[8:]) == 2
        assert reads == sorted(reads)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (Shape(workers=4, per_update=3), "as stages, .*micro_batches is 3, 4 stages need 4$"),
        (
            Shape(workers=3, per_update=4, slack=(1, 1)),
            "micro_batches is 4, 3 stages with a slack of 2 in all need 5$",
        ),
        (
            Shape(workers=3, per_update=4, replicas=(2, 1)),
            "2bw with 2-1 replicas needs at least 5 .* micro_batches is 4$",
        ),
    ],
    ids=["stages", "slack", "replicas"],
)
def test_two_versions_need_an_update_longer_than_the_pipe(shape, words):
    with pytest.raises(ConfigError, match=words):
        TwoVersions().require(shape)
    TwoVersions().require(replace(shape, per_update=shape.per_update + 1))
