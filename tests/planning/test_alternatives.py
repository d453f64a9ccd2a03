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


def explanation(cuts, own, per_update=None, **options):
    """What is said of the best partition for some machines."""

    def plan(other, per_update):
        return partitions(cuts, other, per_update=per_update, replicas=1, **options)

    return explained(plan(own, per_update), own, plan)


def test_it_is_explained_what_would_change_the_answer(golden):
    cuts = cuts_of(chain(3, 1, parameter_bytes=8.0, output_bytes=1.0))
    own = Machines(workers=(Worker(memory=100.0),) * 2, bandwidth_within=8.0)
    golden("explained", explanation(cuts, own))


def test_a_change_for_which_no_plan_fits_is_told(golden):
    cuts = cuts_of(chain(1, 1, parameter_bytes=100.0))
    own = Machines(workers=(Worker(memory=250.0),) * 2)
    golden("explained-without-a-plan", explanation(cuts, own, 2, choices=["1f1b"]))


def test_without_a_limit_of_memory_and_with_one_micro_batch_less_can_be_changed(golden):
    said = explanation(cuts_of(chain(1, 1)), machines(1), 1, choices=["async-1f1b"])
    golden("explained-of-one-worker", said)


def test_stages_stand_in_a_table_with_their_layers_and_workers(golden):
    """Worker 2, which is slow, is left out; a range of workers is told by its ends."""
    workers = tuple(Worker(speed=speed) for speed in (1.0, 1.0, 0.01, 1.0))
    costing = Costing(cuts_of(chain(1, 2, 1, output_bytes=2048.0)), Machines(workers=workers))
    stages = [StageChoice(-1, 0, (0,)), StageChoice(0, 2, (1, 3))]
    golden("partition", partition_text(partition_of(costing, stages, SLOWDOWNS["none"])))
    costing = Costing(cuts_of(chain(3)), machines(3))
    partition = partition_of(costing, [StageChoice(-1, 0, (0, 1, 2))], SLOWDOWNS["none"])
    golden("partition-of-one-stage", partition_text(partition))


def test_names_of_layers_write_nothing_into_a_terminal_or_a_page():
    profile = Profile(layers=(LayerCosts(name="<b>\x1b[2J" + "x" * 99, forward=1.0),))
    costing = Costing(cuts_of(profile), machines(1))
    partition = partition_of(costing, [StageChoice(-1, 0, (0,))], SLOWDOWNS["none"])
    text = partition_text(partition)
    assert text.replace("\n", "").isprintable()
    assert max(map(len, text.splitlines())) <= 80
    assert "<b>" in text
    assert "<b>" not in partition_html(partition)
