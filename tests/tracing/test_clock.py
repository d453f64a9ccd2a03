import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipedream_rt.tracing.clock import ClockMap, Reading, best

DELAYS = st.integers(0, 10**6)


class Peer:
    """A clock that is off and drifts."""

    def __init__(self, offset, drift_ppm):
        self.offset, self.drift = offset, drift_ppm

    def at(self, ours):
        return ours + self.offset + ours * self.drift // 10**6

    def asked(self, when, there, back):
        return Reading(when, self.at(when + there), when + there + back)


@given(
    st.integers(-(10**18), 10**18),
    st.integers(-200, 200),
    st.tuples(DELAYS, DELAYS, DELAYS, DELAYS),
    st.integers(1, 10**13),
    st.lists(st.floats(0, 1), min_size=1),
)
def test_times_between_two_readings_are_right_within_the_stated_error(
    offset, drift, delays, length, places
):
    peer = Peer(offset, drift)
    first, last = peer.asked(0, *delays[:2]), peer.asked(3 * 10**6 + length, *delays[2:])
    mapped = ClockMap(first, last)
    begin, end = first.received, last.sent
    ours = np.array([begin + int(p * (end - begin)) for p in places], dtype=np.int64)
    found = mapped.to_ours(np.array([peer.at(int(t)) for t in ours], dtype=np.int64))
    # A drift also bends the reading itself, by far less than a microsecond.
    assert np.abs(found - ours).max() <= mapped.error + 1000


def test_the_shortest_round_trip_counts():
    readings = [Reading(0, 50, 100), Reading(200, 205, 210), Reading(300, 350, 330)]
    assert best(readings) is readings[1]
    assert readings[0].error == 50
    assert readings[1].offset == 0


def test_never_stays_never_and_one_clock_changes_nothing():
    times = np.array([0, 5, 10**18], dtype=np.int64)
    now = Reading(7, 7, 7)  # of a peer that reads the same clock
    assert ClockMap(now, now).to_ours(times).tolist() == times.tolist()
    mapped = ClockMap(Reading(0, 100, 0), Reading(10, 110, 10))
    assert mapped.to_ours(np.array([0, 105], dtype=np.int64)).tolist() == [0, 5]
