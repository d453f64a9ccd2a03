import threading
from datetime import timedelta

import pytest
from support.deadlines import LATEST_S
from support.messages import message

from pipedream_rt.deadline import Deadline
from pipedream_rt.errors import MessageTimeout, PipelineClosed
from pipedream_rt.messages.inbox import Bell, Inbox, Wanted
from pipedream_rt.messages.message import Gradient, Key, Reply
from pipedream_rt.schedules import COORDINATOR, Edge, EdgeKind


def soon():
    return Deadline(timedelta(seconds=10))


NOW = timedelta(seconds=0)


def gradient(index, generation=0, to=1):
    payload = Gradient(present=[])
    return message(payload, to=to, sender=to + 1, number=index, generation=generation)


def key(number):
    return Key(Edge(EdgeKind.GRADIENT, 2, 1), number)


@pytest.fixture
def inbox():
    return Inbox("stage 1")


def test_messages_are_taken_by_key_whatever_the_order_of_arrival(inbox):
    for index in (2, 0, 1):
        assert inbox.put(gradient(index))
    assert [inbox.take(Wanted(key(i), soon())).number for i in range(3)] == [0, 1, 2]


def test_a_second_delivery_is_dropped(inbox):
    """While the first waits, and after it was taken."""
    assert inbox.put(gradient(0))
    assert not inbox.put(gradient(0))
    inbox.take(Wanted(key(0), soon()))
    assert not inbox.put(gradient(0))
    with pytest.raises(MessageTimeout):
        inbox.take(Wanted(key(0), Deadline(NOW)))


def test_replies_of_two_stages_do_not_hide_each_other():
    inbox = Inbox("the coordinator")
    reply = Reply(structure=["P", None])
    for sender in (0, 1):
        assert inbox.put(message(reply, to=-1, sender=sender, number=4))
    for sender in (1, 0):
        assert (
            inbox.take(Wanted(Key(Edge(EdgeKind.REPLY, sender, COORDINATOR), 4), soon())).sender
            == sender
        )


def test_another_generation_is_refused(caplog):
    inbox = Inbox("stage 1", generation=2)
    assert not inbox.put(gradient(0, generation=1))
    assert "dropped gradient 0 from address 2 to address 1 of generation 1" in caplog.text
    assert inbox.put(gradient(0, generation=2))


def test_a_late_message_is_an_error_that_tells_the_story(inbox):
    inbox.recent.extend(["F0", "F1"])
    inbox.put(gradient(3))
    with pytest.raises(MessageTimeout) as e:
        inbox.take(Wanted(key(0), Deadline(NOW)))
    for words in (
        "stage 1 waited 0 s for gradient 0",
        "holds gradient 3 from stage 2",
        "last actions: F0 F1",
    ):
        assert words in str(e.value)


def test_close_wakes_the_taker_with_the_reason(inbox):
    waiting = threading.Event()
    reasons = []

    def wait():
        waiting.set()
        try:
            inbox.take(Wanted(key(0), soon()))
        except PipelineClosed as error:
            reasons.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert waiting.wait(LATEST_S)
    first = PipelineClosed("first")
    inbox.close(first)
    inbox.close(PipelineClosed("second"))
    thread.join(LATEST_S)
    assert reasons == [first]
    assert inbox.reason is first


def test_what_has_arrived_can_still_be_taken_after_close(inbox):
    inbox.put(gradient(0))
    inbox.close(PipelineClosed("closed"))
    assert not inbox.put(gradient(1))
    assert inbox.take(Wanted(key(0), soon())).number == 0
    with pytest.raises(PipelineClosed):
        inbox.take(Wanted(key(1), soon()))


def test_what_waited_before_the_inbox_opens_again_gives_way_to_what_is_sent_again(inbox):
    assert inbox.put(gradient(0))
    inbox.close(PipelineClosed("why"))
    inbox.reopen(1)
    assert not inbox.holds(key(0))
    assert inbox.put(gradient(0, generation=1))
    assert inbox.take(Wanted(key(0), soon())).generation == 1


def test_a_second_taker_is_refused(inbox):
    inbox._taker = 1  # as while another thread is inside take
    with pytest.raises(RuntimeError, match="waited on by two threads"):
        inbox.take(Wanted(key(1), soon()))


def test_what_was_not_taken_can_be_waited_for_again(inbox):
    """After an error in the wait, as of a signal handler; not if the message has left."""
    inbox.put(gradient(3))
    for step, has_left in (("_find", False), ("_remove", True)):
        original = getattr(inbox, step)

        def raises(*args, original=original):
            original(*args)
            raise KeyError

        setattr(inbox, step, raises)
        with pytest.raises(KeyError):
            inbox.take(Wanted(key(3), soon()))
        setattr(inbox, step, original)
        assert not inbox.busy
        assert inbox.has_taken(key(3)) is has_left
        assert inbox.holds(key(3)) is not has_left
    assert inbox.has_taken(key(2))
    assert not inbox.has_taken(key(4))


def test_holds_and_story(inbox):
    assert not inbox.holds(key(0))
    inbox.put(gradient(0))
    assert inbox.holds(key(0))
    assert inbox.story() == "computing; last actions: none"
    inbox.awaited = (key(3),)
    assert inbox.story() == "waiting for gradient 3 from stage 2; last actions: none"


class Recorded(Bell):
    """A bell that counts who rings, and delivers a message at each wait, as links do."""

    def __init__(self):
        super().__init__()
        self.rung, self.to_come, self.inbox = 0, [], None

    def wait(self, seconds):
        if self.to_come:
            self.inbox.put(self.to_come.pop(0))
        else:
            super().wait(seconds)

    def wake(self):
        self.rung += 1
        super().wake()


@pytest.mark.parametrize("where", ["_find", "_remove"])
def test_a_signal_handler_may_close_while_its_thread_takes(inbox, where):
    """The handler runs in the middle of a method, in the thread that has the lock."""
    inbox.put(gradient(3))
    interrupted = getattr(inbox, where)

    def interrupt(*given):
        inbox.close(PipelineClosed("closed by the handler"))
        return interrupted(*given)

    setattr(inbox, where, interrupt)
    assert inbox.take(Wanted(key(3), soon())).number == 3
    with pytest.raises(PipelineClosed, match="by the handler"):
        inbox.take(Wanted(key(4), soon()))
    assert not inbox.busy


def test_the_story_is_told_while_the_taker_goes_on(inbox):
    """A worker tells it with every sign of life, from another thread than the one that computes."""

    class Slow:
        def __str__(self):
            inbox.recent.append(self)  # as if the taker went on in between
            return "F1"

    for _ in range(10):
        inbox.recent.append(Slow())
    assert inbox.story() == "computing; last actions: " + " ".join(["F1"] * 10)


def test_the_taker_is_woken_for_what_it_waits_for_alone():
    """A thread that is woken for nothing costs more than most messages."""
    bell = Recorded()
    inbox = bell.inbox = Inbox("stage 1", waiter=bell)
    inbox.put(gradient(7))
    assert bell.rung == 0  # nobody waits
    bell.to_come = [gradient(5), gradient(4), gradient(3)]
    assert inbox.take(Wanted(key(3), soon())).number == 3
    assert bell.rung == 1
    for number in (4, 5, 7):
        assert inbox.take(Wanted(key(number), soon())).number == number
    assert bell.rung == 1
