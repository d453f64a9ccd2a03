"""Partitions as text, and what would change the answer."""

from support.profiles import chain, machines

from pipedream_rt.planning.alternatives import explained, partition_html, partition_text
from pipedream_rt.planning.costing import Costing
from pipedream_rt.planning.cuts import cuts_of
from pipedream_rt.planning.machines import Machines, Worker
from pipedream_rt.planning.partition import SLOWDOWNS, partition_of
from pipedream_rt.planning.planner import partitions
from pipedream_rt.planning.profile import LayerCosts, Profile
from pipedream_rt.planning.search import StageChoice


def test_it_is_explained_what_would_change_the_answer():
    cuts = cuts_of(chain(3, 1, parameter_bytes=8.0, output_bytes=1.0))
    own = Machines(workers=(Worker(memory=100.0),) * 2, bandwidth_within=8.0)

    def plan(other, per_update):
        return partitions(cuts, other, per_update=per_update, replicas=1)

    text = explained(plan(own, None), own, plan)
    for expected in (
        "the bottleneck is stage 0",
        "the next best choice is",
        "twice the bandwidth",
        "half the memory",
        "a worker less",
        "a worker more",
        "one micro-batch per update",
    ):
        assert expected in text


def test_stages_stand_in_a_table_with_their_layers_and_workers():
    workers = tuple(Worker(speed=speed) for speed in (1.0, 1.0, 0.01, 1.0))
    costing = Costing(cuts_of(chain(1, 2, 1, output_bytes=2048.0)), Machines(workers=workers))
    stages = [StageChoice(-1, 0, (0,)), StageChoice(0, 2, (1, 3))]
    head, _, first, last, *_ = partition_text(
        partition_of(costing, stages, SLOWDOWNS["none"])
    ).splitlines()
    assert head.startswith("async-1f1b, 1 micro-batches per update: ")
    assert head.endswith(" micro-batches/s on 3 workers")
    assert first.split()[:3] == ["0", "0", "0"]
    assert last.split()[:5] == ["1", "2:", "1", "..", "2"]
    assert last.split()[5] == "1,3"  # worker 2 is left out


def test_a_range_of_workers_is_told_by_its_ends():
    costing = Costing(cuts_of(chain(3)), machines(3))
    partition = partition_of(costing, [StageChoice(-1, 0, (0, 1, 2))], SLOWDOWNS["none"])
    assert "0-2" in partition_text(partition).split()


def test_names_of_layers_write_nothing_into_a_terminal_or_a_page():
    profile = Profile(layers=(LayerCosts(name="<b>\x1b[2J" + "x" * 99, forward=1.0),))
    costing = Costing(cuts_of(profile), machines(1))
    partition = partition_of(costing, [StageChoice(-1, 0, (0,))], SLOWDOWNS["none"])
    text = partition_text(partition)
    assert text.replace("\n", "").isprintable()
    assert max(map(len, text.splitlines())) <= 80
    assert "<b>" in text
    assert "<b>" not in partition_html(partition)


def test_a_change_for_which_no_plan_fits_is_told():
    cuts = cuts_of(chain(1, 1, parameter_bytes=100.0))
    own = Machines(workers=(Worker(memory=250.0),) * 2)

    def plan(other, per_update):
        return partitions(cuts, other, choices=["1f1b"], per_update=per_update, replicas=1)

    lines = explained(plan(own, 2), own, plan).splitlines()
    fitless = [line.partition("no plan fits")[0].strip() for line in lines if "no plan" in line]
    assert fitless == ["half the memory", "a worker less"]
    assert not any("the next best choice" in line for line in lines)
    (same,) = (line for line in lines if "a worker more" in line)
    assert "the same" in same
    assert "1.00 of the worth" in same


def test_without_a_limit_of_memory_and_with_one_micro_batch_less_can_be_changed():
    cuts = cuts_of(chain(1, 1))

    def plan(other, per_update):
        return partitions(cuts, other, choices=["async-1f1b"], per_update=per_update, replicas=1)

    text = explained(plan(machines(1), 1), machines(1), plan)
    for absent in ("the memory", "a worker less", "one micro-batch per update"):
        assert absent not in text
    assert "twice the micro-batches per update" in text
