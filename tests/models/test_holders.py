"""A holder tells what it holds otherwise than when it was looked at."""

import pytest

from pipedream_rt.models.holders import GONE, Holder


class Options:
    def __init__(self):
        self.rate, self.mode = 0.5, None


def changed(value, kind, change):
    holder = Holder(value, kind, "here")
    holder.look()
    assert list(holder.changes()) == []
    change(value)
    return sorted(holder.changes(), key=lambda each: str(each[0]))


def under_another_key(held):
    held["new"] = held.pop("old")


def none_in_another_place(options):
    del options.mode
    options.other = 1


@pytest.mark.parametrize(
    ("value", "kind", "change", "expected"),
    [
        ({"old": [1]}, "dict", under_another_key, [("new", GONE, [1]), ("old", [1], GONE)]),
        (Options(), "object", none_in_another_place, [("mode", None, GONE), ("other", GONE, 1)]),
        ({"a": None}, "dict", lambda held: held.update(a=2), [("a", None, 2)]),
        ([1, 2], "list", lambda held: held.reverse(), [(0, 1, 2), (1, 2, 1)]),
    ],
)
def test_what_has_changed_is_told_by_key(value, kind, change, expected):
    assert changed(value, kind, change) == expected
