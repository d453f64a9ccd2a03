"""What the coordinator feeds: to which addresses, at which turns, and once more in a recovery."""

import dataclasses

import pytest
import torch
from support.messages import head

from pipedream_rt.batches.forwards import SequenceForwards
from pipedream_rt.batches.micro_batches import MicroBatch
from pipedream_rt.coordinator.recovery.feed import Feed
from pipedream_rt.coordinator.recovery.feed_log import Role
from pipedream_rt.errors import ConfigError, PipelineClosed
from pipedream_rt.lifecycle import Lifecycle
from pipedream_rt.messages.head import PLAIN_LOSS, WITH_LOSS, Mode
from pipedream_rt.messages.message import CommandName
from pipedream_rt.messages.tree import flat_copy, unflatten
from pipedream_rt.schedules import EdgeKind, plan_for


class Sent(list):
    """What was sent, and to whom."""

    def __call__(self, key, payload, tensors):
        self.append((key.edge.kind, key.edge.target, key.number, payload, tensors))

    def of(self, kind):
        return [(target, turn) for each, target, turn, *_ in self if each is kind]


def feed_of(forwards=None, layers=(), logged=True, **shape):
    plan = plan_for("async-1f1b", num_stages=2, **shape)
    plan = dataclasses.replace(plan, layers=layers)
    feed = Feed(plan, forwards or SequenceForwards(), Lifecycle("the feed"), logged=logged)
    sent = Sent()
    feed.begin(sent)
    return feed, sent


def train(feed, number, mode=Mode.TRAIN, program=0):
    value = torch.full((2,), float(number))
    part = MicroBatch(program, flat_copy(value), flat_copy(value))
    of_it = head(number, position=feed.position, mode=mode, program=program)
    feed.micro_batch(of_it, part, PLAIN_LOSS)


def test_positions_count_everything_and_turns_what_an_address_was_given():
    feed, sent = feed_of(replicas=[2, 1])
    train(feed, 0)
    assert feed.command(CommandName.FLUSH, 1) == 1
    train(feed, 1)
    assert (feed.position, feed.next_micro_batch) == (3, 2)
    # Replicas of stage 0 are addresses 0 and 1; each micro-batch goes to one of them.
    assert sent.of(EdgeKind.ACTIVATION) == [(0, 0), (1, 1)]
    assert sent.of(EdgeKind.COMMAND) == [(0, 1), (1, 0), (2, 1)]
    assert sent.of(EdgeKind.TARGET) == [(2, 0), (2, 2)]
    activation = next(each[3] for each in sent if each[0] is EdgeKind.ACTIVATION)
    assert activation.turns == [0, 0]


@pytest.mark.parametrize("mode", [Mode.INFER, Mode.EVALUATE], ids=["infer", "evaluate"])
def test_what_does_not_train_counts_no_micro_batch_and_has_a_target_for_a_loss_alone(mode):
    feed, sent = feed_of()
    train(feed, 7, mode)
    assert (feed.position, feed.next_micro_batch) == (1, 0)
    assert bool(sent.of(EdgeKind.TARGET)) is (mode in WITH_LOSS)


def test_nothing_is_kept_where_nothing_is_recovered():
    feed, _ = feed_of(logged=False)
    train(feed, 0)
    assert [*feed.log.since(feed.log.restore_points[0])] == []
    feed, _ = feed_of()
    train(feed, 0)
    feed.log.stop()
    train(feed, 1)
    assert [*feed.log.since(feed.log.restore_points[0])] == []


def test_a_recovery_is_fed_the_same_at_turns_that_begin_anew():
    feed, sent = feed_of()
    train(feed, 0)
    feed.command(CommandName.FLUSH, 1)
    behind = feed.restore_point()
    train(feed, 1)
    train(feed, 2, Mode.EVALUATE)
    after = Sent()
    feed.begin(after)
    assert feed.again(behind) == 2
    assert after.of(EdgeKind.ACTIVATION) == [(0, 0), (0, 1)]
    inputs = [
        (payload.head.position, tensors)
        for kind, *_, payload, tensors in sent + after
        if kind is EdgeKind.ACTIVATION
    ]
    assert [position for position, _ in inputs] == [0, 2, 3, 2, 3]
    assert torch.equal(inputs[1][1][0], inputs[3][1][0])
    assert feed.position == 4  # what is fed again is not counted again
    from_the_start = Sent()
    feed.begin(from_the_start)
    assert feed.again(feed.log.restore_points[0]) == 3
    assert from_the_start.of(EdgeKind.COMMAND) == [(0, 1), (1, 1)]


def test_a_restore_point_has_the_modes_that_were_set_by_then():
    feed, _ = feed_of()
    feed.command(CommandName.TRAINING, (None, False))
    feed.command(CommandName.TRAINING, (1, True))
    point = feed.restore_point()
    assert (point.position, point.training, point.apart) == (2, False, ((1, True),))
    feed.command(CommandName.TRAINING, (None, True))  # for all: no stage stands apart any more
    assert (feed.restore_point().training, feed.restore_point().apart) == (True, ())
    feed.command(CommandName.OPTIMIZER, b"the optimizer")
    assert feed.restore_point().optimizer == b"the optimizer"


def test_what_may_change_weights_is_noted_and_what_loads_them_is_counted():
    feed, _ = feed_of()
    for looks in (CommandName.STATE, CommandName.FLUSH, CommandName.SAVE):
        feed.command(looks)
    assert (feed.touched, feed.loads) == (False, 0)
    feed.command(CommandName.CALL)
    assert (feed.touched, feed.loads) == (True, 0)
    feed.command(CommandName.LOAD)
    feed.command(CommandName.LOAD_STATE)
    assert feed.loads == 2


def test_a_stage_gets_the_entries_of_its_own_layers():
    feed, sent = feed_of(layers=(("a",), ("b", "c")))
    weights = {name: torch.full((1,), float(i)) for i, name in enumerate("abc")}
    state = {f"{name}.weight": tensor for name, tensor in weights.items()}
    feed.command(CommandName.LOAD_STATE, state, Role.OWN)
    given = {
        target: unflatten(payload.structure, tensors) for _, target, _, payload, tensors in sent
    }
    assert {stage: list(part) for stage, part in given.items()} == {
        0: ["a.weight"],
        1: ["b.weight", "c.weight"],
    }
    assert given[1]["c.weight"].item() == 2


def test_stages_are_told_of_a_program_once_and_a_recovery_is_not():
    forwards = SequenceForwards()
    feed, sent = feed_of(forwards)
    feed.define()
    assert not sent
    forwards.definitions[1] = b"program 1"
    feed.define()
    feed.define()
    assert [payload.name for *_, payload, _ in sent] == [CommandName.DEFINE] * 2  # one a stage
    assert feed.begin(Sent()) == [b"program 1"]
    assert feed.again(feed.log.restore_points[0]) == 0
    feed.define()
    assert len(sent) == 2


class Forgetting(SequenceForwards):
    """Forwards that know one program at a time."""

    def unused(self):
        return [n for n in self.definitions if n + 1 in self.definitions and n not in self.told]

    def drop(self, program):
        del self.definitions[program]


def test_a_forgotten_program_is_kept_as_long_as_a_recovery_may_need_it():
    forwards = Forgetting()
    forwards.told = set()
    feed, sent = feed_of(forwards)

    def define(number):
        """Return the numbers that the stages are told to forget."""
        forwards.definitions[number] = str(number).encode()
        del sent[:]
        feed.define()
        forwards.told.update(forwards.definitions.keys() - {number})
        (_, _, _, payload, tensors), _ = sent
        new, forgotten = unflatten(payload.structure, tensors)
        assert new == [str(number).encode()]
        return forgotten

    assert define(1) == []
    train(feed, 1, program=1)
    assert define(2) == [1]
    train(feed, 2, program=2)
    assert sorted(forwards.definitions) == [1, 2]
    # A later generation begins with what the log needs, and is told once more.
    assert feed.begin(sent) == [b"1", b"2"]
    assert define(3) == [1, 2]
    for _ in range(2):  # the run goes back by two restore points at most
        feed.log.begin(feed.restore_point())
    assert define(4) == [3]
    assert sorted(forwards.definitions) == [4]


def test_an_error_while_an_item_is_sent_ends_the_feed():
    feed, _ = feed_of()

    def fail(*_):
        raise ConfigError("half of it was sent")

    feed.begin(fail)
    with pytest.raises(ConfigError, match="half of it"):
        feed.command(CommandName.FLUSH, 0)
    with pytest.raises(PipelineClosed):
        feed.command(CommandName.FLUSH, 0)
