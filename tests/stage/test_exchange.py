"""The messages that a stage gets and sends: on which edges, with which numbers, and what."""

import torch
from support.one_worker import (
    ANY_ORDER,
    ONE,
    THREE,
    TWO,
    Worker,
    activation,
    flush,
    gradient,
    line,
    replied,
    rows,
    target,
)

from pipedream_rt.messages.head import Mode
from pipedream_rt.messages.message import Activation, Gradient, Passed
from pipedream_rt.messages.tree import unflatten


def test_a_micro_batch_carries_what_the_next_stage_needs():
    """Its turn, number, mode and hyper-parameters, and a trail of the stages it has passed."""
    worker = Worker(THREE, 1)
    before = Passed(0, 7, 123, 0, 0)
    worker.put(activation(1, 0, position=4, turn=0, trail=[before])).run()
    (message,) = worker.sent
    payload, head = message.payload, message.payload.head
    assert (message.number, head.position, head.micro_batch) == (0, 4, 0)
    assert (head.mode, head.empty, head.mini_batch.hyper) == (Mode.TRAIN, False, [{}])
    assert payload.requires_grad == [True]
    assert payload.trail[0] == before
    (passed,) = payload.trail[1:]
    assert (passed.fingerprint, passed.changed_buffers) == ("", False)
    assert (passed.stage, passed.version) == (1, 0)
    assert passed.busy_ns > 0
    assert 0 < passed.processor_ns <= passed.process_ns
    expected = worker.stages[1].module(rows(4))
    assert torch.equal(unflatten(payload.structure, message.tensors), expected)


def test_a_loss_tells_which_versions_were_read():
    worker = Worker(TWO, 1)
    worker.put(
        *(activation(1, m, trail=[Passed(0, max(0, m - 1), 5, 0, 0)]) for m in range(3)),
        *(target(1, m) for m in range(3)),
    ).run()
    losses = [m.payload for m in worker.sent if line(m).startswith("loss")]
    assert [[passed[:2] for passed in loss.trail] for loss in losses] == [
        [(0, 0), (1, 0)], [(0, 0), (1, 1)], [(0, 1), (1, 2)]
    ]  # fmt: skip
    assert all(type(loss.loss) is float and loss.structure == [] for loss in losses)


def test_a_gradient_that_is_none_is_not_sent_and_none_is_taken_for_it():
    """The message comes all the same: who waits for it must not wait for ever."""
    worker = Worker(THREE, 1)
    worker.feed("activation 0-1").put(gradient(1, 0, present=False)).run()
    (message,) = [m for m in worker.sent if line(m) == "gradient 0 1>0"]
    assert message.payload == Gradient(present=[False])
    assert message.tensors == ()


@ANY_ORDER
def test_positions_may_jump_where_turns_count(seed):
    """Feed items for other stages are not this stage's turns: positions 0, 3, 7 are turns 0, 1, 2.

    What comes back of an item has its position.
    """
    places = list(enumerate((0, 3, 7)))
    middle = Worker(THREE, 1)
    middle.put(
        *(activation(1, m, position=p, turn=m) for m, p in places),
        flush(1, 12, turn=3),
        *(gradient(1, p) for _, p in places),
        seed=seed,
    )
    assert middle.run() == (
        "activation 0 1>2, activation 1 1>2, gradient 0 1>0, activation 2 1>2, gradient 3 1>0, "
        "gradient 7 1>0, reply 12 1>*"
    )
    forwards = [m.payload.head for m in middle.sent if isinstance(m.payload, Activation)]
    assert [head.position for head in forwards] == [0, 3, 7]
    last = Worker(THREE, 2)
    last.put(
        *(activation(2, m, position=p, turn=m) for m, p in places),
        flush(2, 12, turn=3),
        *(target(2, m, position=p) for m, p in places),
        seed=seed,
    )
    assert last.run() == (
        "loss 0 2>*, gradient 0 2>1, loss 3 2>*, gradient 3 2>1, loss 7 2>*, gradient 7 2>1, "
        "reply 12 2>*"
    )


def test_what_was_replied_does_not_change_with_the_next_update():
    """It is a copy; a transport may take its time to send it."""
    worker = Worker(ONE)
    before = worker.state()["0.weight"].clone()
    worker.feed("state 0, activation 0@1, target 1").run()
    assert torch.equal(replied(worker, 0)["0.weight"], before)
    assert not torch.equal(worker.state()["0.weight"], before)
