import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedream_rt.errors import VersionError
from pipedream_rt.schedules import VersionLedger


def test_a_version_that_is_not_kept_cannot_be_read():
    ledger = VersionLedger(3)
    ledger.advance(1)
    with pytest.raises(VersionError, match=r"stage 3: F5 reads weight version 0.*\[1\]"):
        ledger.pin(5, 0)


def test_a_backward_needs_its_forward():
    ledger = VersionLedger(1)
    ledger.pin(0, 0)
    with pytest.raises(VersionError, match="B4 has no forward"):
        ledger.unpin(4)
    with pytest.raises(VersionError, match="in flight twice"):
        ledger.pin(0, 0)


def test_reset_keeps_the_newest_alone():
    ledger = VersionLedger(0)
    ledger.advance(0)
    assert ledger.reset() == [0]
    assert ledger.floor == 1
    assert ledger.kept == {1}
    ledger.pin(0, 1)
    with pytest.raises(VersionError, match="flush first"):
        ledger.reset()


class SlowLedger:
    """What `VersionLedger` must do, in sets: the definition, without its care for speed."""

    def __init__(self):
        self.newest, self.kept, self.pins = 0, {0}, {}

    def release(self, next_read):
        needed = {self.newest, *self.pins.values()}
        dropped = sorted(v for v in self.kept if v < next_read and v not in needed)
        self.kept.difference_update(dropped)
        return dropped

    def advance(self, next_read):
        in_place = next_read > self.newest and self.newest not in self.pins.values()
        if in_place:
            self.kept.discard(self.newest)
        self.newest += 1
        self.kept.add(self.newest)
        return in_place


@settings(max_examples=300)
@given(st.integers(0, 5), st.lists(st.sampled_from("FFBBSR"), max_size=80), st.randoms())
def test_it_keeps_what_its_definition_keeps(delay, letters, random):
    """Whatever is done in whatever order, backwards out of order too."""
    ledger, slow, forwards, read = VersionLedger(0), SlowLedger(), 0, 0
    for letter in letters:
        read = max(read, min(ledger.newest, max(0, forwards - delay)))
        if letter == "F" and read in ledger.kept:
            assert ledger.release(read) == slow.release(read)
            ledger.pin(forwards, read)
            slow.pins[forwards] = read
            forwards += 1
        elif letter == "B" and slow.pins:
            m = random.choice(sorted(slow.pins))
            assert ledger.pinned(m) == slow.pins[m]
            ledger.unpin(m)
            del slow.pins[m]
        elif letter == "S":
            next_read = random.choice([read, ledger.newest + 1])
            if random.random() < 0.8:
                assert ledger.release(next_read) == slow.release(next_read)
            assert ledger.advance(next_read) == slow.advance(next_read)
            read = max(read, next_read)
        elif letter == "R":
            assert ledger.release(read) == slow.release(read)
        assert ledger.kept == slow.kept
        assert set(slow.pins.values()) <= ledger.kept
        assert ledger.newest in ledger.kept
