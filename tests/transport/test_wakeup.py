import os
import select

from pipedream_rt.transport.wakeup import Alarm


def is_readable(alarm):
    return bool(select.select([alarm], [], [], 0)[0])


def test_it_is_readable_from_the_first_ring_until_quiet():
    alarm = Alarm()
    assert not is_readable(alarm)
    alarm.ring()
    alarm.ring()
    assert is_readable(alarm)
    alarm.quiet()
    assert not is_readable(alarm)
    alarm.quiet()  # nobody rang
    alarm.close()


def test_a_late_ring_touches_nothing_that_was_opened_since():
    alarm = Alarm()
    number = alarm.fileno()
    alarm.close()
    other = os.eventfd(0, os.EFD_NONBLOCK)
    assert other == number, "the kernel gives the smallest number that is free"
    alarm.ring()
    assert not select.select([other], [], [], 0)[0]
    os.close(other)
    assert alarm.fileno() == -1


def test_closing_again_closes_nothing_else():
    alarm = Alarm()
    number = alarm.fileno()
    alarm.close()
    other = os.eventfd(0, os.EFD_NONBLOCK)
    assert other == number
    alarm.close()
    os.close(other)  # else: bad file descriptor
