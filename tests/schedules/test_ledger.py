import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipedream_rt.errors import VersionError
from pipedream_rt.schedules import VersionLedger


def test_a_version_that_is_read_is_kept_beside_the_next():
    ledger = VersionLedger(0)
    ledger.pin(0, 0)
    assert not ledger.advance(1)
    assert ledger.kept == {0, 1}
    ledger.unpin(0)
    assert ledger.release(1) == [0]
    assert ledger.kept == {1}


def test_a_version_that_a_forward_to_come_reads_is_kept():
    ledger = VersionLedger(0)
    assert not ledger.advance(0)
    assert ledger.release(0) == []
    ledger.pin(7, 0)


def test_a_version_that_nobody_reads_is_overwritten():
    ledger = VersionLedger(0)
    ledger.pin(0, 0)
    ledger.unpin(0)
    assert ledger.advance(1)
    assert ledger.kept == {1}


def test_a_version_that_is_not_kept_cannot_be_read():
    ledger = VersionLedger(3)
    ledger.advance(1)
    with pytest.raises(VersionError, match=r"stage 3: F5 reads weight version 0.*\[1\]"):
        ledger.pin(5, 0)


def test_a_backward_needs_its_forward():
    ledger = VersionLedger(1)
    ledger.pin(0, 0)
    with pytest.raises(VersionError, match="B4 without a forward"):
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


@given(st.integers(0, 5), st.lists(st.sampled_from("FBS"), max_size=60))
def test_a_pinned_version_is_never_dropped(delay, letters):
    """Whatever is done in whatever order that a stage could do it."""
    ledger, forwards, backwards = VersionLedger(0), 0, 0
    pinned = {}
    for letter in letters:
        reads = min(ledger.newest, max(0, forwards - delay))
        if letter == "F" and reads in ledger.kept:
            ledger.release(reads)
            ledger.pin(forwards, reads)
            pinned[forwards] = reads
            forwards += 1
        elif letter == "B" and backwards < forwards:
            ledger.unpin(backwards)
            del pinned[backwards]
            backwards += 1
        elif letter == "S":
            ledger.release(reads)
            ledger.advance(reads)
        assert set(pinned.values()) <= ledger.kept
        assert ledger.newest in ledger.kept
