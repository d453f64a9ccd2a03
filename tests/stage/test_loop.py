"""The loop of a worker on the calling thread, by its inbox and a list of what it sends."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from support import diamond
from support.messages import head
from support.models import Raises, mlp, regression
from support.one_worker import (
    ANY_ORDER,
    ONE,
    THREE,
    TWO,
    Worker,
    activation,
    command,
    flush,
    gradient,
    line,
    of,
    replied,
    rows,
    target,
)
from support.oracle import assert_same, layer_seed, oracle
from torch import nn

from pipedream_rt.errors import MessageTimeout, PipelineClosed, ScheduleError, VersionError
from pipedream_rt.messages import inbox as inbox_module
from pipedream_rt.messages.head import WITH_LOSS, LossTask, Mode
from pipedream_rt.messages.message import Activation, CommandName, Failed, Gradient, Passed, Target
from pipedream_rt.messages.tree import flatten, unflatten
from pipedream_rt.schedules import COORDINATOR, Action, Plan, Recipe, Shape, plan_for
from pipedream_rt.schedules.policies import Flushed
from pipedream_rt.stage import loop as loop_module
from pipedream_rt.tracing.spans import NOBODY, SPAN, Recorder

DEALT = plan_for("interleaved-1f1b", num_stages=4, per_update=2)
"""Of which worker 0 has the stages 0 and 2."""

# -- training ---------------------------------------------------------------------------------


@ANY_ORDER
def test_a_stage_in_the_middle_follows_its_order_whatever_comes_first(seed):
    """F0 F1 B0 S0 F2 B1 S1 F3 B2 S2, and for the flush B3 S3; with the same bits."""
    workers = worker, in_order = Worker(THREE, 1), Worker(THREE, 1)
    for each, its_seed in zip(workers, (seed, None)):
        each.feed("activation 0-3, flush 4, gradient 0-3", its_seed)
    assert worker.run() == (
        "activation 0 1>2, activation 1 1>2, gradient 0 1>0, activation 2 1>2, gradient 1 1>0, "
        "activation 3 1>2, gradient 2 1>0, gradient 3 1>0, reply 4 1>*"
    )
    stage = worker.stages[1]
    assert (stage.next_forward, stage.ended, stage.parameters.ledger.newest) == (4, 4, 4)
    in_order.run()
    assert_same(worker.state(), in_order.state())
    for message, expected in zip(worker.sent, in_order.sent, strict=True):
        assert all(map(torch.equal, message.tensors, expected.tensors))


def test_it_waits_for_what_its_next_action_needs_and_for_nothing_else():
    """Gradient 0 is missing: F2 and F3 may not go before B0, though all for them is there."""
    worker = Worker(THREE, 1)
    worker.feed("activation 0-3, gradient 1")
    worker.stops_with(PipelineClosed)
    assert worker.lines() == ["activation 0 1>2", "activation 1 1>2"]
    assert str(worker.loop.doing.action) == "B0"


@ANY_ORDER
def test_a_flush_empties_the_stage_and_training_goes_on_after_it(seed):
    worker = Worker(THREE, 0)
    # The second flush comes with nothing in flight.
    worker.feed(
        "activation 0-1, flush 2, flush 3, activation 2-3@4, flush 6, gradient 0-1, gradient 4-5",
        seed,
    )
    assert worker.run() == (
        "activation 0 0>1, activation 1 0>1, reply 2 0>*, reply 3 0>*, activation 4 0>1, "
        "activation 5 0>1, reply 6 0>*"
    )
    assert worker.stages[0].parameters.ledger.newest == 4


@ANY_ORDER
def test_a_join_takes_both_producers_outputs_whatever_comes_first(seed):
    """In the order of the producers; each gets its own gradient."""
    worker = Worker(diamond.plan(), 3, {3: {"3": diamond.Join(2)}})
    worker.put(
        *(
            activation(3, m, sender=s, trail=[Passed(each, m, 0, 0, 0) for each in (0, s)])
            for m in (0, 1)
            for s in (1, 2)
        ),
        *(target(3, 0), target(3, 1), flush(3, 2)),
        seed=seed,
    )
    assert worker.run() == (
        "loss 0 3>*, gradient 0 3>1, gradient 0 3>2, loss 1 3>*, gradient 1 3>1, gradient 1 3>2, "
        "reply 2 3>*"
    )
    trail = worker.sent[0].payload.trail
    assert [passed[:2] for passed in trail] == [(0, 0), (1, 0), (2, 0), (3, 0)]


@ANY_ORDER
def test_a_fork_sends_one_output_to_both_consumers_and_waits_for_both_gradients(seed):
    worker = Worker(diamond.plan(), 0)
    gradients = [gradient(0, 0, sender=s) for s in (1, 2)]
    worker.put(*(activation(0, m) for m in range(3)), *gradients, seed=seed)
    worker.run()
    assert worker.lines() == [f"activation {m} 0>{s}" for m in range(3) for s in (1, 2)]
    assert torch.equal(worker.sent[0].tensors[0], worker.sent[1].tensors[0])
    assert worker.stages[0].ended == 1


# -- several stages on a worker ---------------------------------------------------------------


@ANY_ORDER
def test_two_stages_on_one_worker_take_turns_as_their_order_says(seed):
    """Worker 0 of 2: stages 0 and 2 of 4."""
    assert " ".join(map(str, DEALT.order(0, 0, 2))) == (
        "0:F0 0:F1 2:F0 2:F1 2:B0 2:B1 0:B0 0:B1 2:S0 0:S0 0:D1 2:D1"
    )
    worker = Worker(DEALT, 0)
    worker.feed(
        "0:activation 0-1, 2:activation 0-1, 0:gradient 0-1, 2:gradient 0-1, 0:flush 2, 2:flush 2",
        seed,
    )
    assert worker.run() == (
        "activation 0 0>1, activation 1 0>1, activation 0 2>3, activation 1 2>3, gradient 0 2>1, "
        "gradient 1 2>1, reply 2 0>*, reply 2 2>*"
    )


@ANY_ORDER
def test_a_worker_that_hosts_all_stages_trains_the_unsplit_model(seed):
    """All that is sent comes back to it; on one thread, equal to the oracle to the bit."""
    plan = plan_for("interleaved-1f1b", num_stages=2, per_update=2, stages_per_worker=2)
    model, data = mlp(layers=4), regression(3, samples=4)
    layers = list(model.named_children())
    weights, losses = oracle(
        model, [0], data, F.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), k=2, reads="flushed"
    )
    worker = Worker(plan, 0, [dict(layers[:2]), dict(layers[2:])])
    fed = []
    for m, (x, y) in enumerate((x, y) for t in data for x, y in zip(*(v.chunk(2) for v in t))):
        structure, tensors = flatten(x)
        payload = Activation(
            head=head(m), turns=[m] * 4, structure=structure, requires_grad=[False]
        )
        fed.append(of(payload, 0, m, tuple(tensors)))
        structure, tensors = flatten(y)
        fed.append(of(Target(structure=structure, task=LossTask(share=0.5)), 1, m, tuple(tensors)))
    worker.put(*fed, flush(0, 6), flush(1, 6), seed=seed).run()
    assert_same(worker.state(), weights)
    assert [m.payload.loss for m in worker.sent if line(m).startswith("loss")] == losses


class AllOnOne:
    """All stages of a diamond on worker 0: forwards, backwards the other way, steps."""

    def order(self, worker, shape, start):
        for m in range(start, 1000):
            for kind, stages in (("F", range(4)), ("B", range(3, -1, -1)), ("S", range(4))):
                yield from (Action.parse(f"{s}:{kind}{m}") for s in stages)


def test_a_diamond_on_one_worker_is_the_plain_model():
    recipe = Recipe(order=AllOnOne(), versions=Flushed(), flushes=True, summary="")
    plan = Plan(
        name="all", shape=Shape(workers=4), recipe=recipe, links=diamond.LINKS, hosts=(0, 0, 0, 0)
    )
    model = diamond.model(2)
    worker = Worker(plan, 0, [{n: copy.deepcopy(layer)} for n, layer in model.named_children()])
    worker.feed("0:activation 0-2, 3:target 0-2").run()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for m in range(3):
        optimizer.zero_grad()
        hidden = model[0](rows(m))
        torch.manual_seed(layer_seed(0, m, "1"))  # its dropout
        pair = model[1](hidden), model[2](hidden)
        F.mse_loss(model[3](pair), rows(m + 100)).backward()
        optimizer.step()
    assert_same(worker.state(), model.state_dict())


# -- a micro-batch without samples ------------------------------------------------------------


@ANY_ORDER
def test_an_empty_micro_batch_goes_all_the_way_and_back(seed):
    plan = plan_for("gpipe", num_stages=2, per_update=2)
    last = Worker(plan, 1).feed("activation 0, empty 1, target 0-1, flush 2", seed)
    assert last.run() == "loss 0 1>*, loss 1 1>*, gradient 0 1>0, gradient 1 1>0, reply 2 1>*"
    assert [m.payload.loss is None for m in last.sent[:2]] == [False, True]
    assert last.sent[3].payload == Gradient(present=[])
    first = Worker(plan, 0)
    first.put(of(Gradient(present=[]), 0, 1, sender=1))
    first.feed("activation 0, empty 1, gradient 0, flush 2", seed)
    assert first.run() == "activation 0 0>1, activation 1 0>1, reply 2 0>*"
    payload = first.sent[1].payload
    assert (payload.head.empty, payload.requires_grad, first.sent[1].tensors) == (True, [], ())


def test_the_halves_of_a_backward_send_once():
    """I sends; W does not, and ends the micro-batch."""
    plan = plan_for("zero-bubble", num_stages=2, per_update=2)
    assert " ".join(map(str, plan.order(1, 0, 2))) == "F0 I0 F1 I1 W0 W1 S0 D1"
    worker = Worker(plan, 1).feed("activation 0, empty 1, target 0-1, flush 2")
    assert worker.run() == "loss 0 1>*, gradient 0 1>0, loss 1 1>*, gradient 1 1>0, reply 2 1>*"
    whole = Worker(plan_for("gpipe", num_stages=2, per_update=2), 1)
    whole.feed("activation 0, empty 1, target 0-1, flush 2").run()
    assert_same(worker.state(), whole.state())


# -- what is no training ----------------------------------------------------------------------


@ANY_ORDER
def test_a_command_is_carried_out_at_its_turn_between_two_micro_batches(seed):
    """After F1, with both in flight; the weights are those of before the first update."""
    worker = Worker(TWO, 0)
    before = worker.state()["0.weight"].clone()
    worker.feed(
        "activation 0-1, state 2, activation 2@3, state 4, flush 5, gradient 0-1, gradient 3", seed
    )
    assert worker.run() == (
        "activation 0 0>1, activation 1 0>1, reply 2 0>*, activation 3 0>1, reply 4 0>*, "
        "reply 5 0>*"
    )
    assert not torch.equal(replied(worker, 2)["0.weight"], before)  # B0 and S0 come before F2
    assert not torch.equal(replied(worker, 4)["0.weight"], replied(worker, 2)["0.weight"])
    assert not torch.equal(worker.state()["0.weight"], replied(worker, 4)["0.weight"])
    assert replied(worker, 5) is None


@pytest.mark.threads
def test_a_save_is_told_of_when_it_is_written_and_other_commands_do_not_wait(tmp_path):
    """It is due after an update that comes later; `close` waits for the writing."""
    worker = Worker(ONE)
    worker.put(command(0, 0, CommandName.SAVE, {"folder": str(tmp_path), "step": 1}))
    worker.feed("state 1, activation 0@2, target 2").run()
    assert worker.lines()[0] == "reply 1 0>*"
    assert sorted(worker.lines()) == ["loss 2 0>*", "reply 1 0>*", "saved 0 0>*"]
    (saved,) = [m for m in worker.sent if line(m).startswith("saved")]
    files, _, _, _ = unflatten(saved.payload.structure, saved.tensors)
    assert files.keys() == {path.name for path in tmp_path.iterdir()}
    again = Worker(ONE, rate=0.3)
    files = [path.name for path in tmp_path.iterdir()]
    restore = {"folder": str(tmp_path), "files": files, "step": 1, "plain": {}, "floor": 0}
    again.put(command(0, 0, CommandName.LOAD, restore)).run()
    assert replied(again, 0) is True
    assert_same(again.state(), worker.state())
    assert again.stages[0].next_forward == 1


@ANY_ORDER
def test_an_evaluation_passes_through_a_stage_at_its_turn(seed):
    """It is numbered apart, and reads the newest weights; nothing comes back."""
    worker = Worker(THREE, 1)
    worker.feed("activation 0, evaluate 0@1, activation 1@2, infer 1@3, gradient 0", seed)
    assert worker.run() == (
        "activation 0 1>2, activation 1 1>2, activation 2 1>2, gradient 0 1>0, activation 3 1>2"
    )
    sent = [m.payload for m in worker.sent if isinstance(m.payload, Activation)]
    assert [(each.head.mode, each.head.micro_batch) for each in sent] == [
        (Mode.TRAIN, 0), (Mode.EVALUATE, 0), (Mode.TRAIN, 1), (Mode.INFER, 1)
    ]  # fmt: skip
    assert [each.requires_grad for each in sent] == [[True], [False], [True], [False]]
    assert [each.trail[-1].version for each in sent] == [0, 0, 0, 1]
    assert [each.head.mini_batch.hyper for each in sent] == [[{}], [], [{}], []]
    newest = worker.stages[1].module(rows(3))
    assert torch.equal(worker.sent[-1].tensors[0], newest)


@ANY_ORDER
def test_a_target_is_taken_only_where_there_is_a_loss(seed):
    """Evaluation has one, inference has none and gives the output."""
    worker = Worker(TWO, 1)
    worker.feed("evaluate 0, target 0, infer 1, activation 0@2, target 2", seed)
    assert worker.run() == "loss 0 1>*, loss 1 1>*, loss 2 1>*, gradient 2 1>0"
    evaluated, inferred, trained = worker.sent[:3]
    assert evaluated.payload.loss is not None
    assert evaluated.payload.structure == []
    assert inferred.payload.loss is None
    assert unflatten(inferred.payload.structure, inferred.tensors).shape == (3, 2)
    assert trained.payload.loss is not None


@ANY_ORDER
def test_passes_take_both_producers_outputs_too(seed):
    worker = Worker(diamond.plan(), 3, {3: {"3": diamond.Join(2)}})
    worker.put(
        *(activation(3, 0, sender=s, mode=Mode.EVALUATE) for s in (1, 2)),
        target(3, 0),
        *(activation(3, 1, sender=s, mode=Mode.INFER) for s in (1, 2)),
        seed=seed,
    )
    assert worker.run() == "loss 0 3>*, loss 1 3>*"
    join = worker.stages[3].module[0]
    assert torch.equal(worker.sent[1].tensors[0], join((rows(1), rows(1))))


class FailsInEval(nn.Module):
    def forward(self, x):
        if not self.training:
            raise KeyError("x")
        return x


def described(error):
    text = repr(error)
    return Failed(address=1, action="evaluate 0", type_name="KeyError", text=text, trace="")


@ANY_ORDER
def test_a_pass_that_fails_goes_on_its_way_and_training_goes_on(seed):
    """The next stage and the coordinator wait for it; nothing was trained by it."""
    layers = {1: {"1": nn.Sequential(FailsInEval(), nn.Linear(2, 2))}}
    worker = Worker(THREE, 1, layers, failed=described)
    worker.feed("evaluate 0, infer 1, activation 0@2", seed)
    assert worker.run() == "activation 0 1>2, activation 1 1>2, activation 2 1>2"
    evaluated, inferred, trained = (message.payload for message in worker.sent)
    assert evaluated.failed == inferred.failed == described(KeyError("x"))
    assert worker.sent[0].tensors == ()
    assert trained.failed is None
    assert worker.stages[1].runner.at is None  # a later error is not of this layer


@ANY_ORDER
@pytest.mark.parametrize("mode", [Mode.EVALUATE, Mode.INFER])
def test_what_has_failed_before_is_passed_on_and_not_computed(seed, mode):
    worker, failed = Worker(TWO, 1), described(KeyError("x"))
    first = activation(1, 0, mode=mode)
    first = dataclasses.replace(
        first,
        payload=dataclasses.replace(first.payload, failed=failed, structure=["P", None]),
        tensors=(),
    )
    targets = [target(1, 0)] if mode in WITH_LOSS else []
    worker.put(first, *targets, activation(1, 0, position=1), target(1, 1), seed=seed)
    assert worker.run() == "loss 0 1>*, loss 1 1>*, gradient 1 1>0"
    passed = worker.sent[0].payload
    assert (passed.loss, passed.structure, passed.failed) == (None, [], failed)


def test_without_a_word_for_it_an_error_of_a_pass_ends_the_loop():
    worker = Worker(THREE, 1, {1: {"1": FailsInEval()}})
    worker.feed("infer 0")
    with pytest.raises(KeyError):
        worker.run()


@ANY_ORDER
def test_what_does_not_train_is_served_for_every_stage_of_a_worker(seed):
    """While the first stage has nothing to do: a pass must come through all of them."""
    worker = Worker(DEALT, 0)
    worker.feed("0:evaluate 0, 2:evaluate 0, 2:state 1", seed).run()
    assert sorted(worker.lines()) == ["activation 0 0>1", "activation 0 2>3", "reply 1 2>*"]
    assert worker.loop.doing.stage == 0


def test_a_micro_batch_to_train_on_is_not_taken_for_another_stage():
    """Stage 2 has one; it is the order that says when."""
    worker = Worker(DEALT, 0)
    worker.put(activation(2, 0))
    worker.stops_with(PipelineClosed)
    assert worker.sent == []
    assert worker.inbox.holds(activation(2, 0).key)


@ANY_ORDER
def test_a_flush_of_two_stages_comes_after_what_was_fed_to_each_before_it(seed):
    worker = Worker(DEALT, 0)
    worker.feed("0:flush 0, 2:infer 0, 2:flush 1", seed).run()
    assert sorted(worker.lines()) == ["activation 0 2>3", "reply 0 0>*", "reply 1 2>*"]


# -- what is reported -------------------------------------------------------------------------


@pytest.mark.parametrize("announced", [0, 1, 2])
def test_actions_are_announced_before_they_are_done_and_called_off_after(announced):
    """For micro-batches, and updates, with lower numbers alone."""
    told = []
    worker = Worker(TWO, 1, announce=told.append, announced=announced)
    worker.feed("activation 0-2, target 0-2").run()
    expected = [f"1:{kind}{m}" for m in range(announced) for kind in "FBS"]
    assert told == [text for action in expected for text in (action, "")]


def test_an_action_that_fails_stays_announced_and_is_what_the_worker_does():
    told = []
    worker = Worker(
        TWO,
        1,
        {1: {"1": nn.Sequential(nn.Linear(2, 2), Raises(0))}},
        announce=told.append,
        announced=5,
    )
    worker.feed("activation 0, target 0").stops_with(ZeroDivisionError)
    assert told == ["1:F0"]
    assert (worker.loop.doing.stage, str(worker.loop.doing.action)) == (1, "F0")


def test_the_last_actions_are_remembered_for_a_report():
    worker = Worker(TWO, 1).feed("state 0, infer 0@1, activation 0@2, target 2")
    worker.run()
    assert list(map(str, worker.inbox.recent)) == ["state", "infer 1", "F0", "B0", "S0"]


class Clock:
    """Stands still until it is moved."""

    def __init__(self):
        self.now = 1000

    def monotonic_ns(self):
        return self.now

    perf_counter_ns = monotonic_ns


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(loop_module, "time", made)
    monkeypatch.setattr(inbox_module, "time", made)
    return made


def table(recorder, *fields):
    return [
        (chr(span["kind"]), *(int(span[field]) for field in fields)) for span in recorder.spans()
    ]


def test_a_span_says_what_was_done_with_which_version_and_how_much_was_sent(clock):
    recorder = Recorder(50)
    worker = Worker(THREE, 1, recorder=recorder)
    worker.feed("state 0, activation 0-1@1, infer 0@3, flush 4, gradient 1-2").run()
    sent = 3 * 2 * 4
    weights = (4 + 2) * 4
    assert table(recorder, "stage", "index", "version", "kept", "in_flight", "bytes") == [
        ("C", 1, 0, 0, 1, 0, weights),
        ("F", 1, 0, 0, 1, 1, sent),
        ("F", 1, 1, 0, 1, 2, sent),
        ("B", 1, 0, 0, 1, 1, sent),
        ("S", 1, 0, 1, 2, 1, 0),
        ("E", 1, 3, 1, 2, 1, sent),
        ("B", 1, 1, 0, 2, 0, sent),
        ("S", 1, 1, 2, 2, 0, 0),
        ("D", 1, 2, 2, 2, 0, 0),
    ]


def test_a_span_says_whom_it_waited_for_and_when_that_came(clock):
    """A step waits for nobody; a flush for the coordinator."""
    recorder = Recorder(50)
    worker = Worker(THREE, 1, recorder=recorder)
    came = ("gradient 0", "activation 1", "activation 0", "flush 2", "gradient 1")
    for number, each in enumerate(came, 1):
        clock.now = 10 * number
        worker.feed(each)
    worker.run()
    assert table(recorder, "waited_for", "arrived") == [
        ("F", 0, 30), ("F", 0, 20), ("B", 2, 10), ("S", NOBODY, 0), ("B", 2, 50),
        ("S", NOBODY, 0), ("D", COORDINATOR, 50),
    ]  # fmt: skip


@pytest.mark.parametrize("later", [1, 2])
def test_a_join_has_waited_for_the_later_of_its_producers(clock, later):
    recorder = Recorder(50)
    worker = Worker(diamond.plan(), 3, {3: {"3": diamond.Join(2)}}, recorder=recorder)
    for now, sender in ((10, 3 - later), (20, later)):
        clock.now = now
        worker.put(activation(3, 0, sender=sender))
    clock.now = 30
    worker.put(target(3, 0)).run()  # the coordinator sends it along; nobody waits for it
    assert table(recorder, "waited_for", "arrived")[0] == ("F", later, 20)


@pytest.mark.parametrize("later", [1, 2])
def test_a_fork_has_waited_for_the_later_of_its_consumers(clock, later):
    recorder = Recorder(50)
    worker = Worker(diamond.plan(), 0, recorder=recorder)
    worker.put(*(activation(0, m) for m in range(3)))
    for now, sender in ((10, 3 - later), (20, later)):
        clock.now = now
        worker.put(gradient(0, 0, sender=sender))
    worker.run()
    assert table(recorder, "waited_for", "arrived")[3] == ("B", later, 20)


def test_a_trace_is_asked_for_stage_by_stage(clock):
    """Of a worker with two: each gets its own spans, and how many of the worker's were lost."""
    worker = Worker(DEALT, 0, recorder=Recorder(3))
    worker.feed("2:infer 0-1, 0:infer 0-1, 0:trace 2, 2:trace 2").run()
    for stage, dropped in ((0, 0), (2, 2)):
        (message,) = [m for m in worker.sent if line(m) == f"reply 2 {stage}>*"]
        reply = unflatten(message.payload.structure, message.tensors)
        spans = reply["spans"].numpy().view(SPAN)
        seen = [(chr(s["kind"]), s["stage"], s["index"]) for s in spans]
        assert seen == [("E", stage, 0), ("E", stage, 1)]
        assert reply["dropped"] == dropped
        assert reply["parameter_bytes"] == 24
        assert reply["peak_memory_bytes"] > 0


def test_without_a_recorder_there_is_no_trace():
    worker = Worker(ONE).feed("trace 0")
    worker.run()
    assert replied(worker, 0) == {}


# -- what is refused --------------------------------------------------------------------------


def written(texts, **kwargs):
    """A user's schedule for one stage, which does these actions and no more."""

    class Written:
        def order(self, worker, shape, start):
            return map(Action.parse, texts.split())

    return plan_for(Written(), proved=False, num_stages=1, **kwargs)


def fed(plan, count=4):
    """The worker of a one-stage plan, to which so many micro-batches were fed."""
    return Worker(plan).feed(f"activation 0-{count - 1}, target 0-{count - 1}")


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ("F0 F1 B1 B0", "stage 0: .*B1.* before B0"),
        ("F0 F1 I0 I1 W1 W0", "stage 0: .*W1.* before W0"),
        ("F0 B0 S1", "stage 0: .*S1.* before S0"),
        ("F0 B1", "B1"),
        ("F0 B0 B0", "B0"),
    ],
)
def test_a_written_schedule_that_comes_out_of_turn_is_refused(texts, words):
    """Gradients would be summed in another order: other bits, without a word."""
    worker = fed(written(texts, per_update=2))
    worker.stops_with((ScheduleError, VersionError), words)
    assert str(worker.loop.doing.action) in words


def test_an_order_and_a_feed_that_disagree_are_both_named():
    error = fed(written("F0 F2", per_update=2)).stops_with(ScheduleError)
    for words in ("stage 0", "F2", "activation 1 from the coordinator"):
        assert words in str(error)


class EarlyBackward:
    def order(self, worker, shape, start):
        return map(Action.parse, ("F0", "B3"))


def test_a_backward_of_what_is_not_in_flight_is_refused():
    """Before its gradient is waited for, which would never come."""
    worker = Worker(plan_for(EarlyBackward(), proved=False, num_stages=2, per_update=2), 0)
    worker.feed("activation 0")
    worker.stops_with(ScheduleError, r"stage 0: .*micro-batch 3.*\[0\]")


def test_a_schedule_that_ends_wants_a_flush_then():
    """As a replay does; flushes after it find nothing to do."""
    worker = fed(written("F0 B0 S0 F1 B1 S1"), 2)
    worker.feed("state 2, flush 3")
    assert worker.run() == "loss 0 0>*, loss 1 0>*, reply 2 0>*, reply 3 0>*"


def test_a_schedule_that_ends_refuses_what_it_has_no_action_for():
    worker = fed(written("F0 B0 S0 F1 B1 S1"), 3)
    error = worker.stops_with(ScheduleError)
    for words in ("Written", "micro-batch 1"):
        assert words in str(error)
    assert worker.stages[0].ended == 2


def test_a_message_that_is_sure_to_come_is_waited_for_until_the_timeout():
    """The error tells what is there instead, and what was done before."""
    worker = Worker(THREE, 1).feed("activation 0-1, gradient 1")
    with pytest.raises(MessageTimeout) as e:
        worker.inbox.follow(worker.loop.run())
    for words in ("the worker", "gradient 0 from stage 2", "gradient 1 from stage 2", "F0 F1 B0"):
        assert words in str(e.value)


def test_so_is_a_target():
    worker = Worker(TWO, 1).feed("activation 0")
    with pytest.raises(MessageTimeout, match="target 0 from the coordinator"):
        worker.inbox.follow(worker.loop.run())


def test_the_reason_why_the_inbox_was_closed_ends_the_loop():
    worker = Worker(ONE)
    worker.inbox.close(KeyError("a peer is lost"))
    with pytest.raises(KeyError, match="a peer is lost"):
        worker.inbox.follow(worker.loop.run())
