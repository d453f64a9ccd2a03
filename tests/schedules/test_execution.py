"""The execution of all orders against each other: what is done, who waits, and for what."""

import pytest
from support.plans import in_script, listed
from support.written import RisingSteps

from pipedream_rt.schedules import COORDINATOR, Action, EdgeKind, plan_for
from pipedream_rt.schedules.edges import Edge, Need
from pipedream_rt.schedules.execution import Execution, Waiting, deadlock_of

ASYNC = plan_for("async-1f1b", num_stages=3)


def by_worker(done, worker):
    return " ".join(str(action) for each, _, action in done if each == worker)


@pytest.mark.parametrize("credits", [1, 2, None], ids=["one", "two", "never waits"])
def test_each_worker_does_its_order_whatever_the_coordinator_may_inject(credits):
    execution = Execution(ASYNC, 6, credits=credits)
    done = list(execution)
    for worker in (*range(3), COORDINATOR):
        assert by_worker(done, worker) == " ".join(map(str, ASYNC.order(worker, 0, 6)))
    assert execution.waiting == []


def test_a_mini_batch_is_injected_when_there_is_a_credit_for_it():
    """With one credit, each loss comes before the next micro-batch goes in."""
    done = [(worker, str(action)) for worker, _, action in Execution(ASYNC, 3, credits=1)]
    for m in (1, 2):
        assert done.index((COORDINATOR, f"N{m}")) > done.index((2, f"F{m - 1}"))
    done = [(worker, str(action)) for worker, _, action in Execution(ASYNC, 3, credits=2)]
    assert done.index((COORDINATOR, "N1")) < done.index((2, "F0"))


def test_a_flush_empties_the_pipe_on_the_way():
    done = list(Execution(ASYNC, 6, flushes=[3]))
    for worker in range(3):
        orders = (*ASYNC.order(worker, 0, 3), *ASYNC.order(worker, 3, 6))
        assert by_worker(done, worker) == " ".join(map(str, orders))


def test_an_action_that_waits_is_looked_at_once_and_before_it_is_done():
    seen, done = [], []
    for each in Execution(ASYNC, 5, look=lambda *seen_now: seen.append(seen_now)):
        assert each in seen
        done.append(each)
    assert len(seen) == len(done)
    assert set(seen) == set(done)


def test_who_waits_for_ever_is_told_with_the_message_that_is_missing():
    plan = listed(plan_for("1f1b", num_stages=2, per_update=2), "F0 B0 F1 B1 S0", "F0 F1 B0 B1 S0")
    execution = Execution(plan, 2)
    assert by_worker(execution, 0) == "F0"
    first, last = sorted(each for each in execution.waiting if each.worker != COORDINATOR)
    assert first == Waiting(0, 0, Action.parse("B0"), Need(Edge(EdgeKind.GRADIENT, 1, 0), 0))
    assert last.need == Need(Edge(EdgeKind.ACTIVATION, 0, 1), 1)
    assert deadlock_of(execution.waiting, plan.title_of) == (
        "deadlock: stage 0 waits in B0 for gradient 0 from stage 1, "
        "stage 1 waits in F1 for activation 1 from stage 0"
    )


def test_a_deadlock_for_norms_says_what_to_do():
    plan = plan_for(
        RisingSteps(), num_stages=4, per_update=2, stages_per_worker=2, proved=False
    ).with_norms()
    execution = Execution(plan, 4)
    list(execution)
    who, hint = deadlock_of(execution.waiting, plan.title_of).splitlines()
    assert "for norm 0 from stage" in who
    assert "from its last stage to its first" in hint


def test_a_coordinator_that_waits_alone_is_no_deadlock():
    """It waits because a worker's order has ended."""
    execution = Execution(listed(ASYNC, "F0", "F0", ""), 4, credits=1)
    list(execution)
    assert [each.worker for each in execution.waiting] == [COORDINATOR]
    assert deadlock_of(execution.waiting, ASYNC.title_of) == ""


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble", "async-1f1b"])
def test_a_script_that_computes_the_loss_keeps_nobody_waiting(name):
    plan = in_script(name, per_update=4 if name == "gpipe" else 1)
    execution = Execution(plan, 8, credits=plan.credits())
    done = [(worker, str(action)) for worker, _, action in execution]
    assert execution.waiting == []
    for m in range(8):
        last = m // plan.per_update * plan.per_update + plan.per_update - 1
        at = done.index((COORDINATOR, f"G{m}"))
        assert done.index((2, f"F{last}")) < at
        assert at < done.index((2, f"I{m}" if name == "zero-bubble" else f"B{m}"))


def test_a_deadlock_by_the_script_says_which_schedule_does_not_wait():
    plan = in_script("1f1b", per_update=4)
    execution = Execution(plan, 4)
    assert [str(action) for worker, _, action in execution if worker == 2] == ["F0"]
    text = deadlock_of(execution.waiting, plan.title_of)
    assert "stage 2 waits in B0 for gradient 0 from the coordinator" in text
    assert 'schedule="gpipe"' in text
