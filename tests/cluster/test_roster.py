"""What the roster decides: tables of events and instructions, and any order of events."""

import logging
import math
from dataclasses import dataclass
from datetime import timedelta
from itertools import count

import pytest
from hypothesis import Phase as Search
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pipedream_rt.cluster.peer_listeners import PeerAddress
from pipedream_rt.cluster.records import VERSION
from pipedream_rt.cluster.roster import (
    Admit,
    Close,
    Died,
    Drop,
    End,
    Form,
    Gather,
    GiveUp,
    Joined,
    JoiningFailed,
    Kill,
    Leave,
    Left,
    Log,
    Loss,
    Meet,
    Member,
    Met,
    Missing,
    Phase,
    Report,
    Roster,
    Said,
    Shut,
    Start,
    Started,
    Stop,
    Stopped,
    Tell,
    Tick,
    Watch,
    Welcome,
    WorkerSlot,
    natural,
    process_of,
)
from pipedream_rt.errors import (
    ConfigError,
    PeerLost,
    PipelineClosed,
    RendezvousTimeout,
    TransportError,
    WorkerLost,
)
from pipedream_rt.job.process_assignment import ProcessAssignment
from pipedream_rt.schedules import plan_for

JOB, SOFTWARE, BOOT = "0" * 32, "torch 2, pipedream-rt 1", "kernel"
GONE = PeerLost("the worker closed the connection", peer="w")
LOOPBACK = PeerAddress("127.0.0.1", 7)


def hello(name, **changes):
    return {
        "type": "hello", "job": JOB, "name": name, "pid": 7, "host": "here", "boot": BOOT,
        "software": SOFTWARE, "returns": True, "version": VERSION, **changes,
    }  # fmt: skip


def gather(fewest=2, most=None, wait=0.0, until=100.0, heartbeat_s=10.0):
    assignment = ProcessAssignment(
        fewest=fewest, most=most or fewest, wait=timedelta(seconds=wait),
        stays_open=most is not None,
    )  # fmt: skip
    workers = most or fewest
    plan = plan_for("1f1b", num_stages=workers, per_update=workers)
    return Gather(plan, assignment, until, until, heartbeat_s)


class Job:
    """A roster, with an hour glass in the hand of the test."""

    def __init__(self, **asked):
        self.roster = Roster(JOB, SOFTWARE, BOOT)
        self.now, self.logged, self.levels, self.members = 0.0, [], [], {}
        if asked:
            self.do(gather(**asked))

    def do(self, event, at=None):
        """Take an event; return the instructions, without what is told to people."""
        self.now = self.now if at is None else at
        done = self.roster.handle(event, self.now)
        # As the adapter does while something is awaited.
        if not isinstance(event, Tick) and self.roster.phase in (
            Phase.GATHERING,
            Phase.WELCOMED,
            Phase.MEETING,
        ):
            done += self.roster.handle(Tick(), self.now)
        self.logged += [each.text % each.arguments for each in done if isinstance(each, Log)]
        self.levels += [each.level for each in done if isinstance(each, Log)]
        self.members |= {each.member.name: each.member for each in done if isinstance(each, Admit)}
        return [each for each in done if not isinstance(each, Log)]

    def come(self, name, connection=None, at=None, nearby=True, **changes):
        return self.do(Joined(connection or f"to {name}", hello(name, **changes), nearby), at)

    def ready(self, name, at=None, processor="a kind"):
        said = {"type": "ready", "processor": processor, "obstacle": ""}
        return self.do(Said(self.members[name], said), at)

    def door(self, name, address=LOOPBACK):
        return self.do(Said(self.members[name], {"type": "door", "at": address}))

    def joined(self, name):
        return self.do(Said(self.members[name], {"type": "joined", "nearby": []}))

    def left(self, name, error=GONE):
        return self.do(Left(self.members[name], error))

    def gathered(self, *names):
        for name in names:
            self.come(name)
        return [self.ready(name) for name in names][-1]

    def forming(self, *names):
        self.gathered(*names)
        return self.do(Form("coordinator", LOOPBACK, until=100.0))

    def running(self, *names):
        self.forming(*names)
        for name in names:
            self.door(name)
        self.do(Met())
        for name in names:
            self.joined(name)
        return self.do(Watch())


def test_a_life_from_the_first_hello_to_the_last_word():
    job = Job(fewest=2)
    assert [type(each) for each in job.come("w1")] == [Admit]
    assert [type(each) for each in job.come("w0")] == [Admit]
    assert job.ready("w1") == []
    (welcome,) = job.ready("w0")
    assert [m.name for m in welcome.members] == ["w0", "w1"]
    assert [m.slots for m in welcome.members] == [
        [WorkerSlot(0, "stage 0", (0,))], [WorkerSlot(1, "stage 1", (1,))],
    ]  # fmt: skip
    assert [m.stage for m in welcome.members] == [0, 1]
    assert job.do(Form("coordinator", LOOPBACK, until=100.0)) == []
    assert job.door("w1") == []
    *told, meet = job.door("w0")
    assert meet == Meet({"coordinator": LOOPBACK, "w0": LOOPBACK, "w1": LOOPBACK})
    assert [each.connection for each in told] == ["to w0", "to w1"]
    assert job.joined("w0") == []
    assert job.do(Met()) == []
    assert job.joined("w1") == [Start()]
    assert job.do(Watch()) == []
    assert job.do(Stop(until=50)) == [
        Tell("to w0", {"type": "stop"}),
        Tell("to w1", {"type": "stop"}),
    ]
    assert job.do(Said(job.members["w0"], {"type": "stopped"})) == []
    assert job.do(Said(job.members["w1"], {"type": "stopped"})) == [Stopped()]
    bye = {"type": "exit", "failed": False}
    assert job.do(Leave(failed=False)) == [
        Tell("to w0", bye), Tell("to w1", bye), Drop("to w0"), Drop("to w1"),
    ]  # fmt: skip
    assert job.roster.phase is Phase.RESTING
    assert job.roster.members == []
    assert job.logged == []


# -- who may become a member ----------------------------------------------------------------------

REFUSED = [
    *[({"version": version}, "it speaks protocol ", False)
      for version in (VERSION + 1, None, 1, "6", b"x", 1 << 60, "\n" * 100, {})],
    ({"name": "not a name"}, "its hello makes no sense: ", False),
    ({"pid": "seven"}, "its hello makes no sense: ", False),
    ({"job": "1" * 32}, "it belongs to another job", False),
    ({"software": "torch 1"}, "it has torch 1, and the script torch 2", False),
    ({"name": "w0"}, "the name 'w0' is taken by pid 7 on here", True),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "reason", "passing"), REFUSED)
def test_who_is_refused(changes, reason, passing):
    job = Job(fewest=3)
    job.come("w0")
    tell, drop = job.come(**{"name": "w1", **changes}, connection="x")
    assert tell.connection == drop.connection == "x"
    assert tell.record["reason"].startswith(reason)
    assert tell.record["reason"].isprintable()
    assert len(tell.record["reason"]) < 200
    assert tell.record["passing"] is passing
    assert bool(job.roster.refused) is not passing
    assert "refused worker" in job.logged[0]
    assert job.levels == [logging.WARNING]
    assert [m.name for m in job.roster.coming] == ["w0"]


@pytest.mark.parametrize("field", ["job", "name", "pid", "host", "boot", "software", "returns"])
def test_a_field_of_another_type_or_length(field):
    """The boot of a machine that does not say it is empty; so is a job that is not known."""
    values = [None, "x\x1b[2J", "x" * 300, b"", b"x" * 33, -1, 2**40, 1.5, [], {}]
    values += ["", True][field in ("host", "boot", "software", "job") :][:1]
    for value in values:
        reason = (
            Job(fewest=1).come(**{"name": "w", field: value}, connection="x")[0].record["reason"]
        )
        assert reason.startswith(f"its hello makes no sense: its {field!r} is ")
        assert reason.isprintable()
        assert len(reason) < 200


def test_one_too_many_may_try_again():
    job = Job(fewest=2)
    job.come("w0"), job.come("w1")
    tell, _ = job.come("w2")
    assert tell.record == {
        "type": "refused",
        "reason": "the job has its 2 workers",
        "passing": True,
    }
    assert job.levels == [logging.INFO]  # who has all that it needs has nothing to do
    job.left("w1")
    assert isinstance(job.come("w2")[0], Admit)


def test_while_none_is_gathered_nobody_comes_in():
    job = Job()
    assert isinstance(job.come("w0")[0], Tell)
    job.do(gather(fewest=1))
    assert isinstance(job.come("w0")[0], Admit)


def test_a_worker_started_here_is_known_by_its_connection():
    job = Job(fewest=1)
    job.do(Started("pair", "worker-0"))
    tell, _ = job.come("worker-1", connection="pair")
    assert "was started as 'worker-0'" in tell.record["reason"]
    job = Job(fewest=1)
    job.do(Started("pair", "worker-0"))
    (admit,) = job.come("worker-0", connection="pair", job="", returns=False)
    assert (admit.member.is_local, admit.member.returns) == (True, True)


@pytest.mark.parametrize(("boot", "same"), [(BOOT, True), ("other", False), ("", False)])
def test_whose_clock_is_the_same(boot, same):
    job = Job(fewest=1)
    (admit,) = job.come("w", boot=boot)
    assert admit.member.same_clock is same


def test_the_end_of_the_script_is_told_to_whoever_comes():
    job = Job()
    job.roster.over = 3
    assert job.come("w") == [Tell("to w", {"type": "over", "code": 3}), Drop("to w")]
    assert job.roster.informed == {"w"}


def test_after_the_end_nobody_becomes_a_member():
    job = Job(fewest=2)
    job.come("w0")
    told, drop, end = job.do(Shut())
    assert (told.record["type"], drop) == ("exit", Drop("to w0"))
    assert str(end.cause) == "the pipeline was closed while it waited for workers"
    assert job.come("w1") == [Drop("to w1")]
    job = Job()
    job.roster.most = 1
    job.come("w0"), job.do(Started("pair", "w1"))
    assert job.do(Shut()) == [
        Tell("to w0", {"type": "exit", "failed": False}), Drop("to w0"), Drop("pair"),
    ]  # fmt: skip


# -- the wait for workers -------------------------------------------------------------------------


def ended(done):
    """Return the cause of the one end in some instructions."""
    (cause,) = [each.cause for each in done if isinstance(each, End)]
    return cause


def test_a_wait_that_is_over_names_who_did_not_come():
    job = Job(fewest=3, most=4, until=5)
    job.do(Started("pair 10", "w10")), job.do(Started("pair 9", "w9"))
    job.come("w1"), job.come("w0")
    job.ready("w0")
    job.come("w2", software="other")
    assert job.do(Tick(), at=4) == []
    cause = ended(job.do(Tick(), at=5))
    assert isinstance(cause, Missing)
    assert cause.missing == 1
    assert cause.text.startswith(
        "1 of 3 workers did not join within 5 s: w9, w10; joined: w0, w1; 'w2' was"
    )
    assert {m.name for m in job.roster.members} == {"w0", "w1"}  # they hear the end by `Leave`


def test_who_still_imports_torch_is_named():
    job = Job(fewest=2, until=5)
    job.come("w0"), job.come("w1")
    job.ready("w0")
    assert "joined: w0; still importing torch: w1" in ended(job.do(Tick(), at=5)).text


@pytest.mark.parametrize("admitted", [False, True])
def test_a_worker_started_here_that_says_nothing_is_noticed_by_the_heartbeat(admitted):
    job = Job(fewest=1, heartbeat_s=2)
    job.do(Started("pair", "w0"))
    if admitted:
        job.come("w0", connection="pair")
    assert job.do(Tick(), at=2) == []
    cause = ended(job.do(Tick(), at=2.1))
    assert isinstance(cause, WorkerLost)
    assert "'w0' has been silent since it was started" in str(cause)


def test_a_worker_from_elsewhere_may_take_long_to_import_torch():
    job = Job(fewest=1, heartbeat_s=2)
    job.come("w0")
    assert job.do(Tick(), at=99) == []
    assert isinstance(job.ready("w0")[0], Welcome)


def test_a_worker_started_here_that_ends_is_an_error_and_one_from_elsewhere_is_none():
    job = Job(fewest=1)
    job.do(Started("pair", "w0"))
    assert ended(job.do(Died("pair", GONE))) == Loss("w0", None, GONE)
    job = Job(fewest=1)
    job.do(Started("pair", "w0"))
    job.come("w0", connection="pair")
    assert ended(job.left("w0")) == Loss("w0", job.members["w0"], GONE)
    job = Job(fewest=1)
    job.come("w0")
    assert job.left("w0") == []
    assert "left before all had come" in job.logged[0]
    assert isinstance(job.come("w0")[0], Admit)  # the name is free again


def test_an_elastic_generation_begins_without_those_that_are_late():
    job = Job(fewest=1, most=3, wait=5)
    job.come("w0"), job.ready("w0", at=1)
    job.come("w1", at=4), job.ready("w1")
    assert job.do(Tick(), at=8.9) == []
    (welcome,) = job.do(Tick(), at=9)
    assert [m.hosts for m in welcome.members] == ["stage 0 and stage 1", "stage 2"]
    assert "worker processes: 2, for the work of 3" in job.logged[-1]


def test_an_elastic_generation_does_not_wait_where_all_have_come_that_are_expected():
    job = Job(fewest=1, most=3, wait=50)
    job.gathered("w0"), job.do(Tick(), at=60)
    job.come("w1", at=61), job.ready("w1")
    assert job.roster.expect() == 1
    job.do(Leave(failed=True))
    job.do(gather(fewest=1, most=3, wait=50, until=200))
    job.come("w0")
    assert isinstance(job.ready("w0")[0], Welcome)
    assert job.roster.expected == 0
    assert isinstance(Job(fewest=1, most=2, wait=50).gathered("w0", "w1")[0], Welcome)


def test_several_kinds_of_processor_are_told_of():
    job = Job(fewest=2)
    job.come("w0"), job.come("w1")
    job.ready("w0", processor="x"), job.ready("w1", processor="y")
    assert "several kinds of processor: x (w0); y (w1)" in job.logged[0]


def test_names_are_ranked_with_their_numbers():
    names = ["w10", "w2", "a-2-b", "a-10-a", "w", "10", "9"]
    expected = ["a-2-b", "a-10-a", "w", "w2", "w10", "9", "10"]
    assert sorted(names, key=natural) == expected
    assert natural("a1") != natural("a2")


def test_text_from_outside_is_escaped_and_cut():
    assert process_of({"pid": 1, "host": "h\n\x1b[31mERROR"}) == r"pid 1 on h\n\x1b[31mERROR"
    assert len(process_of({"pid": 1, "host": "h" * 1000})) < 120
    assert process_of({}) == "pid None on None"


LOST = [
    ({"slots": [WorkerSlot(1, "worker 1", (1, 3))]}, "killed by SIGKILL", " (note)",
     "worker 'w' (stages 1, 3, pid 7 on here) is gone: killed by SIGKILL (note)"),
    ({"slots": [WorkerSlot(2, "stage 2", (2,))]}, "still running", "",
     "worker 'w' (stage 2, pid 7 on here) does not answer: still running"),
    ({"slots": [WorkerSlot(0, "stage 0", (0,)), WorkerSlot(1, "worker 1", (1, 3))]}, "", "",
     "worker 'w' (stage 0 and stages 1, 3, pid 7 on here) is gone"),
    ({}, "", "", "worker 'w' (no stage yet, pid 7 on here) is gone"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "ending", "note", "text"), LOST)
def test_a_lost_member_is_named_with_its_stages_its_process_and_its_end(fields, ending, note, text):
    member = Member("w", "pid 7 on here", None, stage=1, doing="F4", **fields)
    error = member.lost(ending, GONE, note)
    assert str(error) == text
    assert (error.worker, error.stage, error.doing, error.crashed) == ("w", 1, "F4", False)
    assert error.__cause__ is GONE
    assert member.lost("killed by SIGSEGV").crashed
    assert str(member.lost("", TransportError("odd"))).endswith("is gone (odd)")


# -- a group forms --------------------------------------------------------------------------------


def test_a_member_that_is_lost_while_the_group_forms_ends_it():
    job = Job(fewest=2)
    job.forming("w0", "w1")
    assert ended(job.left("w1")) == Loss("w1", job.members["w1"], GONE)
    assert job.left("w0") == []  # one end is enough


@pytest.mark.parametrize(("kind", "returns", "final"), [
    ("failed", True, False), ("unfit", True, True), ("failed", False, True),
])  # fmt: skip
def test_a_member_that_cannot_join_says_why(kind, returns, final):
    job = Job(fewest=1)
    job.come("w0", returns=returns), job.ready("w0")
    job.do(Form("coordinator", LOOPBACK, until=100.0))
    done = job.do(Said(job.members["w0"], {"type": kind, "text": "no route"}))
    assert done[0] == Drop("to w0")
    cause = ended(done)
    assert "worker 'w0' could not join: no route" in str(cause)
    assert isinstance(cause.__cause__, ConfigError) is final
    assert isinstance(job.members["w0"].ended, JoiningFailed)


def test_a_member_that_says_what_a_coordinator_says_is_gone():
    job = Job(fewest=1)
    job.running("w0")
    drop, report = job.do(Said(job.members["w0"], {"type": "stop"}))
    assert drop == Drop("to w0")
    assert "sent a 'stop', which only a coordinator sends" in report.loss.note


def test_a_member_that_does_not_answer_its_welcome_is_noticed_by_the_heartbeat():
    job = Job(fewest=2, heartbeat_s=3)
    job.forming("w0", "w1")
    job.door("w0")
    assert job.do(Tick(), at=3) == []
    cause = ended(job.do(Tick(), at=3.1))
    assert (cause.name, "within the heartbeat" in cause.note) == ("w1", True)


def test_a_group_that_does_not_form_in_time():
    job = Job(fewest=1, until=200)
    job.forming("w0")
    job.door("w0")
    assert isinstance(ended(job.do(Tick(), at=100)), RendezvousTimeout)


def test_a_member_on_loopback_among_others_elsewhere_is_refused():
    job = Job(fewest=2)
    job.gathered("w0", "w1")
    job.do(Form("coordinator", PeerAddress("10.0.0.1", 1), until=100.0))
    job.door("w0", PeerAddress("10.0.0.2", 2))
    cause = ended(job.door("w1"))
    assert str(cause).startswith(
        "'w1' of the group cannot be reached from other machines: the addresses are coordinator "
        "10.0.0.1:1, w0 10.0.0.2:2, w1 127.0.0.1:7; "
    )
    assert cause.missing == 1


@pytest.mark.parametrize("event", [Close(), Stop(9.0), GiveUp()])
def test_to_close_while_the_group_forms_ends_the_wait(event):
    job = Job(fewest=1)
    job.forming("w0")
    cause = ended(job.do(event))
    assert isinstance(cause, PipelineClosed)
    assert str(cause) == "the pipeline was closed while its workers joined"


# -- a generation runs ----------------------------------------------------------------------------


def test_a_member_that_is_lost_is_reported_once():
    job = Job(fewest=2)
    job.running("w0", "w1")
    assert job.left("w1") == [Report(Loss("w1", job.members["w1"]))]
    assert job.left("w1") == []
    assert job.do(Tick(), at=1) == []


def test_one_that_ends_before_it_is_watched_is_reported_then():
    job = Job(fewest=1)
    job.forming("w0")
    job.door("w0"), job.do(Met()), job.joined("w0")
    assert job.left("w0", TransportError("too long")) == []
    assert job.do(Watch()) == [Report(Loss("w0", job.members["w0"], None, " (too long)"))]


def test_a_member_that_is_silent_is_reported_and_replaced():
    job = Job(fewest=2, heartbeat_s=4)
    job.running("w0", "w1")
    for second in range(1, 5):
        job.do(Said(job.members["w0"], {"type": "beat", "doing": "", "rss": 1}), at=second)
        assert job.do(Tick()) == []
    kill, report = job.do(Tick(), at=4.5)
    assert kill == Kill("w1")
    assert report.loss == Loss("w1", job.members["w1"], None, " (it has been silent for 4.5 s)")
    assert job.do(Tick(), at=5) == []


def test_who_has_stopped_may_be_silent():
    job = Job(fewest=1, heartbeat_s=4)
    job.running("w0")
    job.do(Said(job.members["w0"], {"type": "stopped"}))
    assert [job.do(Tick(), at=second) for second in range(1, 9)] == [[]] * 8


def test_while_the_coordinator_itself_stood_still_nobody_counts_as_silent():
    job = Job(fewest=1, heartbeat_s=4)
    job.running("w0")
    assert job.do(Tick(), at=50) == []
    job.do(Said(job.members["w0"], {"type": "beat", "doing": "", "rss": 1}), at=50.1)
    assert job.do(Tick(), at=51) == []


def test_a_member_that_was_silent_and_then_goes_is_reported_once():
    job = Job(fewest=1, heartbeat_s=4)
    job.running("w0")
    for second in (2, 4, 6):
        done = job.do(Tick(), at=second)
    assert [type(each) for each in done] == [Kill, Report]
    assert job.left("w0") == []


def test_what_comes_in_one_moment_is_judged_together():
    """As after the coordinator has stood still: the next record lies unread beside the first."""
    job = Job(fewest=2, heartbeat_s=3)
    job.do(Started("pair 0", "w0")), job.do(Started("pair 1", "w1"))
    job.come("w0", connection="pair 0"), job.come("w1", connection="pair 1")
    said = {"type": "ready", "processor": "x", "obstacle": ""}
    handle, (first, second) = job.roster.handle, job.members.values()
    assert handle(Said(first, said), 50.0) == handle(Said(second, said), 50.0) == []
    (welcome,) = handle(Tick(), 50.0)
    assert isinstance(welcome, Welcome)
    assert handle(Form("coordinator", LOOPBACK, until=100.0), 50.0) == []
    for member in (first, second):
        assert handle(Said(member, {"type": "door", "at": LOOPBACK}), 60.0) == []
    assert isinstance(handle(Tick(), 60.0)[-1], Meet)


def test_one_that_is_ready_and_gone_in_one_moment_is_no_member():
    job = Job(fewest=1)
    job.come("w0")
    said = {"type": "ready", "processor": "x", "obstacle": ""}
    job.roster.handle(Said(job.members["w0"], said), 1.0)
    assert [type(each) for each in job.roster.handle(Left(job.members["w0"], GONE), 1.0)] == [Log]
    assert job.do(Tick(), at=1) == []
    assert job.roster.phase is Phase.GATHERING


def test_a_generation_that_was_closed_is_not_watched():
    job = Job(fewest=1)
    job.forming("w0")
    job.door("w0"), job.do(Met()), job.joined("w0")
    job.do(Close())
    assert job.do(Watch()) == []
    assert job.roster.phase is Phase.ENDING


def test_who_leaves_while_workers_are_awaited_ends_the_wait():
    job = Job(fewest=2)
    job.come("w0")
    end, *told = job.do(Leave(failed=True))
    assert isinstance(end.cause, PipelineClosed)
    assert told == [Tell("to w0", {"type": "exit", "failed": True}), Drop("to w0")]


def test_a_worker_started_here_that_was_refused_is_missing_by_its_name():
    job = Job(fewest=1, until=5)
    job.do(Started("pair", "w0"))
    job.come("w0", connection="pair", software="other")
    cause = ended(job.do(Tick(), at=5))
    assert cause.text.startswith(
        "1 of 1 workers did not join within 5 s: w0; joined: none; 'w0' was"
    )


def test_in_the_end_no_loss_is_reported():
    job = Job(fewest=1)
    job.running("w0")
    job.do(Close())
    assert job.left("w0") == []
    assert job.do(Leave(failed=True)) == [Drop("to w0")]  # to whom nothing can be said


@pytest.mark.parametrize(("event", "at"), [(Tick(), 9.0), (GiveUp(), 0.0), (Left, 0.0)])
def test_who_does_not_stop_is_not_awaited_for_ever(event, at):
    job = Job(fewest=1)
    job.running("w0")
    assert Stopped() not in job.do(Stop(until=9.0))
    assert job.do(event(job.members["w0"], GONE) if event is Left else event, at) == [Stopped()]


def test_before_stages_run_there_is_nothing_to_stop():
    job = Job(fewest=1)
    job.gathered("w0")
    assert [type(each) for each in job.do(Stop(until=9.0))] == [End, Stopped]
    assert job.do(Leave(failed=False))[0] == Tell("to w0", {"type": "exit", "failed": False})
    assert job.do(Stop(until=9.0)) == [Stopped()]


def test_who_comes_while_a_generation_runs_is_in_the_next_one():
    job = Job(fewest=1, most=2)
    job.running("w0"), job.do(Tick(), at=1)
    assert isinstance(job.come("w1")[0], Admit)
    assert "is taken" in job.come("w1", connection="x")[0].record["reason"]
    assert "is taken" in job.come("w0", connection="x")[0].record["reason"]
    assert job.levels[-2:] == [logging.INFO] * 2
    assert job.come("w2")[0].record["reason"] == "the job has its 2 workers"
    job.do(Leave(failed=True))
    assert [m.name for m in job.roster.coming] == ["w1"]
    job.do(gather(fewest=1, most=2))
    job.ready("w1")
    assert isinstance(job.come("w0")[0], Admit)


def test_what_was_left_of_workers_started_here_is_dropped_with_their_generation():
    job = Job(fewest=2)
    job.do(Started("pair 0", "w0")), job.do(Started("pair 1", "w1"))
    job.come("w0", connection="pair 0")
    job.do(Close())
    told, *dropped = job.do(Leave(failed=True))
    assert told == Tell("pair 0", {"type": "exit", "failed": True})
    assert dropped == [Drop("pair 0"), Drop("pair 1")]
    job.do(gather(fewest=2, until=5))
    assert job.do(Died("pair 1", GONE)) == []  # it does not end the next one
    assert "did not join within 5 s; joined: none" in ended(job.do(Tick(), at=5)).text


# -- any order of events --------------------------------------------------------------------------


HELLOS = [{}, {}, {}, {"software": "x"}, {"version": 1}]
KINDS = [
    *["ready"] * 3, *["door"] * 2, *["joined"] * 2, "beat", "stopped", "failed", "unfit", "hello",
    "story",
]  # fmt: skip


@dataclass(eq=False)
class Wire:
    """A connection, as the outside knows it."""

    name: str
    here: bool = False
    member: Member | None = None
    is_open: bool = True
    is_refused: bool = False


class AnyOrder(RuleBasedStateMachine):
    """Joins, records, deaths, late comers, strangers and ticks in any order, against the rules."""

    def __init__(self):
        super().__init__()
        self.roster, self.now = Roster(JOB, SOFTWARE, BOOT), 0.0
        self.wires, self.awaits = [], None
        self.begun, self.ends, self.reported = [], 0, []
        self.deadline, self.numbers = math.inf, count()

    # What the adapter does with instructions, held against the rules.

    def handle(self, event, ticks=True):
        for each in self.roster.handle(event, self.now):
            self.carry_out(each)
        if ticks and self.roster.phase in (Phase.GATHERING, Phase.WELCOMED, Phase.MEETING):
            self.handle(Tick(), ticks=False)

    def carry_out(self, each):
        match each:
            case Admit(member):
                wire = member.connection
                assert wire.is_open
                assert wire.member is None, "nobody is admitted twice"
                others = [w.member.name for w in self.wires if w.is_open and w.member is not None]
                assert member.name not in others, "a name stands for one member"
                wire.member = member
            case Tell(wire, _):
                assert wire.is_open, "nothing is said where nobody hears it"
            case Drop(wire):
                wire.is_open = False
            case Welcome(members):
                assert self.awaits == "welcome"
                assert all(m.ready and m.ended is None for m in members)
                self.begun, self.awaits = list(members), None
            case Meet(addresses):
                assert self.awaits == "start"
                assert {*addresses} == {"coordinator", *(m.name for m in self.begun)}
                assert all(m.ended is None for m in self.begun)
            case Start():
                assert self.awaits == "start"
                assert all(m.ended is None and m.met is not None for m in self.begun)
                self.awaits = None
            case Stopped():
                assert self.awaits == "stopped"
                self.awaits = None
            case End(cause):
                assert cause is not None
                assert self.ends == 0, "a generation ends once"
                self.ends += 1
                if self.awaits != "stopped":
                    self.awaits = None
            case Report(loss):
                assert self.roster.phase is Phase.RUNNING, "no loss is reported in the end"
                self.reported.append(loss.member)
            case Kill(name):
                assert name in {m.name for m in self.begun}

    @property
    def asked(self):
        return self.awaits is not None

    @initialize(most=st.integers(1, 3), elastic=st.booleans())
    def begins(self, most, elastic):
        self.most, self.elastic = most, elastic

    # The script.

    @precondition(lambda self: self.roster.phase is Phase.RESTING and not self.roster.is_shut)
    @rule(here=st.integers(0, 3))
    def gathers(self, here):
        self.deadline, self.awaits = self.now + 30, "welcome"
        self.begun, self.ends, self.reported = [], 0, []
        most = self.most if self.elastic else None
        fewest = 1 if self.elastic else self.most
        asked = gather(fewest, most, wait=2, until=self.deadline, heartbeat_s=4)
        self.handle(asked)
        for number in range(min(here, self.most)):
            if self.awaits == "welcome":
                wire = Wire(f"w{number}", here=True)
                self.wires.append(wire)
                self.handle(Started(wire, wire.name))

    @precondition(
        lambda self: self.begun and self.roster.phase is Phase.WELCOMED and not self.asked
    )
    @rule()
    def forms(self):
        self.awaits = "start"
        self.handle(Form("coordinator", LOOPBACK, self.deadline))

    @precondition(lambda self: self.awaits == "start")
    @rule()
    def meets(self):
        self.handle(Met())

    @precondition(lambda self: self.roster.phase is Phase.FORMED)
    @rule()
    def watches(self):
        self.handle(Watch())

    @rule(event=st.sampled_from([Close(), GiveUp()]))
    def closes(self, event):
        self.handle(event)

    @precondition(lambda self: self.awaits in (None, "welcome", "start"))
    @rule()
    def stops(self):
        if self.awaits is not None:
            self.handle(Close())
        self.awaits, self.deadline = "stopped", self.now + 5
        self.handle(Stop(self.deadline))

    @precondition(lambda self: self.awaits is None)
    @rule(failed=st.booleans())
    def leaves(self, failed):
        mine = [*self.roster.members]
        self.handle(Leave(failed))
        assert not any(m.connection.is_open for m in mine), "after the end nobody is left"
        assert not any(w.is_open for w in self.wires if w.here), "nor anybody started here"

    @precondition(lambda self: not self.roster.is_shut)
    @rule(chance=st.integers(0, 9))
    def shuts(self, chance):
        if chance == 0:
            coming = [*self.roster.coming]
            self.handle(Shut())
            if self.roster.phase is Phase.RESTING:
                assert not any(m.connection.is_open for m in coming)

    # The workers, and whoever else calls.

    @rule(name=st.sampled_from(["w0", "w1", "w2", "w3"]), fits=st.sampled_from(HELLOS))
    def joins(self, name, fits):
        wire = Wire(name)
        self.wires.append(wire)
        self.handle(Joined(wire, hello(name, **fits), True))
        assert wire.member is not None or not wire.is_open, "whoever comes is admitted or sent away"

    def speaking(self, data, *, admitted):
        wires = [w for w in self.wires if w.is_open and (w.member is not None) is admitted]
        return data.draw(st.sampled_from(wires)) if wires else None

    @rule(data=st.data())
    def says_hello_that_was_started_here(self, data):
        wire = self.speaking(data, admitted=False)
        if wire is not None:
            self.handle(Joined(wire, hello(wire.name, job=""), True))

    @rule(data=st.data(), kind=st.sampled_from(KINDS))
    def says(self, data, kind):
        wire = self.speaking(data, admitted=True)
        if wire is not None:
            more = {"ready": {"processor": "x", "obstacle": ""}, "door": {"at": LOOPBACK},
                    "joined": {"nearby": []}}.get(kind, {"text": "why"})  # fmt: skip
            self.handle(Said(wire.member, {"type": kind, **more}))

    @rule(data=st.data())
    def dies(self, data):
        wire = self.speaking(data, admitted=data.draw(st.booleans()))
        if wire is not None:
            wire.is_open = False
            self.handle(Died(wire, GONE) if wire.member is None else Left(wire.member, GONE))

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 3.0, 20.0]))
    def time_passes(self, seconds):
        self.now += seconds
        self.handle(Tick())

    @rule()
    def all_do_what_they_should(self):
        for kind in ("ready", "door", "joined"):
            for member in [w.member for w in self.wires if w.is_open and w.member is not None]:
                more = {"ready": {"processor": "x", "obstacle": ""}, "door": {"at": LOOPBACK},
                        "joined": {"nearby": []}}[kind]  # fmt: skip
                self.handle(Said(member, {"type": kind, **more}))

    # The rules.

    @invariant()
    def every_wait_has_an_end(self):
        if self.now >= self.deadline and self.asked:
            self.handle(Tick())
            assert not self.asked, f"{self.awaits} is awaited for ever"

    @invariant()
    def a_generation_that_has_begun_has_its_members_or_ends(self):
        gone = [m for m in self.begun if m.ended is not None]
        if gone and self.roster.phase is Phase.RUNNING:
            assert all(m in self.reported for m in gone)
        if self.roster.phase in (Phase.WELCOMED, Phase.MEETING, Phase.FORMED, Phase.RUNNING):
            assert self.roster.members == self.begun
        if gone and self.roster.phase in (Phase.WELCOMED, Phase.MEETING):
            raise AssertionError("a group goes on forming without one of its members")

    @invariant()
    def nobody_is_reported_twice(self):
        assert len({*map(id, self.reported)}) == len(self.reported)

    @invariant()
    def there_are_no_more_than_there_may_be(self):
        assert len(self.roster.coming) <= max(self.roster.most, 0)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    # Without the search for a shorter example, which takes minutes here.
    max_examples=60, stateful_step_count=50, deadline=None,
    phases=[Search.explicit, Search.generate],
)  # fmt: skip
