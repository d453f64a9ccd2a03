"""The workers of a pipeline, as the objects in the script use them."""

import contextlib
import gc
from types import SimpleNamespace

import pytest
import torch

from pipedream_rt.batches.forwards import SequenceForwards
from pipedream_rt.coordinator.recovery.feed import Feed
from pipedream_rt.coordinator.recovery.group import WorkerGroup
from pipedream_rt.errors import ConfigError, PipelineClosed, WorkerLost
from pipedream_rt.lifecycle import Lifecycle
from pipedream_rt.messages.message import CommandName, Key, Message, Reply
from pipedream_rt.messages.tree import flatten
from pipedream_rt.schedules import EdgeKind, plan_for


class Recovery:
    """Stages that reply to each command at once, and one failure that is recovered from."""

    def __init__(self, reply=lambda stage: stage, refused=()):
        self.plan = plan_for("async-1f1b", num_stages=2, replicas=[2, 1])
        self.ended, self.failures, self.taken = [], [], []
        self.life = Lifecycle("the pipeline", lambda: self.ended.append(True))
        self.feed = Feed(self.plan, SequenceForwards(), self.life, logged=True)
        self.feed.begin(lambda *_: None)
        self.before_workers_end = []
        self.reply, self.refused = reply, refused
        self.cluster = SimpleNamespace(
            check_settings_unchanged=lambda: None, waiting=contextlib.nullcontext, number=0
        )
        self.inbox = SimpleNamespace(holds=lambda key: key.edge.source != 2)

    def take(self, key, again=False):
        return self.through(lambda: self.wait(key))

    def through(self, ask):
        while True:
            try:
                if self.failures:
                    raise self.failures.pop()
                return ask()
            except WorkerLost:
                self.cluster.number += 1

    def wait(self, key):
        self.taken.append(key)
        source = key.edge.source
        structure, tensors = flatten(self.reply(source))
        refused = "it is not there" if source in self.refused else ""
        return Message(
            key=key, generation=1, payload=Reply(structure=structure, refused=refused),
            tensors=tuple(tensors),
        )  # fmt: skip


def test_every_address_replies_and_replica_0_stands_for_its_stage():
    group = WorkerGroup(Recovery(lambda stage: {"w": torch.full((1,), float(stage))}))
    replies = group.command(CommandName.STATE)
    assert [reply["w"].item() for reply in replies] == [0.0, 1.0, 2.0]
    assert [reply["w"].item() for reply in group.of_stages(replies)] == [0.0, 2.0]


def test_a_refusal_is_raised_with_its_stage_when_all_replies_were_taken():
    recovery = Recovery(refused=(1, 2))
    group = WorkerGroup(recovery)
    with pytest.raises(ConfigError, match=r"^stage 0, replica 1: it is not there$"):
        group.command(CommandName.STATISTICS)
    assert [key.edge.source for key in recovery.taken] == [0, 1, 2]
    assert recovery.life.is_open


@pytest.mark.parametrize("name", [CommandName.STATE, CommandName.LOAD], ids=["looks", "changes"])
@pytest.mark.parametrize("refused", [(), (0,)], ids=["answered", "refused"])
def test_what_only_looks_is_not_fed_again_by_a_recovery(name, refused):
    group = WorkerGroup(Recovery(refused=refused))
    with contextlib.suppress(ConfigError):
        group.command(name)
    log = group.feed.log
    kept = [entry.position for entry in log.since(log.restore_points[0])]
    assert kept == ([] if name.leaves_no_trace else [0])


def test_nobody_waits_for_replies_that_have_come():
    group = WorkerGroup(Recovery())
    edges = list(group.plan.edges(EdgeKind.REPLY))
    assert [group.holds(Key(edge, 0)) for edge in edges] == [True, True, False]
    assert not group.replied(0, EdgeKind.REPLY)
    group.recovery.inbox.holds = lambda key: True
    assert group.replied(0, EdgeKind.REPLY)


def test_a_question_to_the_cluster_is_asked_again_of_the_next_one():
    recovery = Recovery()
    group = WorkerGroup(recovery)
    recovery.failures.append(WorkerLost("it is gone", worker="w", stage=0))
    assert group.call(lambda cluster: cluster.number) == 1


def test_after_the_end_nothing_is_fed():
    recovery = Recovery()
    group = WorkerGroup(recovery)
    recovery.life.close()
    with pytest.raises(PipelineClosed):
        group.command(CommandName.STATE)
    assert group.feed.position == 0


def test_a_group_that_nobody_refers_to_ends_its_workers():
    recovery = Recovery()
    group = WorkerGroup(recovery)
    assert recovery.ended == []
    del group
    gc.collect()
    assert recovery.ended == [True]
