"""A holder tells what it holds otherwise than when it was looked at."""

import pytest
import torch
from torch import nn

from pipedream_rt.models.holders import GONE, Holder, Look


class Options:
    def __init__(self):
        self.rate, self.mode = 0.5, None


def changed(value, kind, change):
    holder = Holder(value, kind, "here")
    holder.look()
    assert list(holder.changes()) == []
    change(value)
    return sorted(holder.changes(), key=lambda each: str(each[0]))


def renamed(held):
    held["new"] = held.pop("old")


def none_in_another_place(options):
    del options.mode
    options.other = 1


@pytest.mark.parametrize(
    ("value", "kind", "change", "expected"),
    [
        ({"old": [1]}, "dict", renamed, [("new", GONE, [1]), ("old", [1], GONE)]),
        (Options(), "object", none_in_another_place, [("mode", None, GONE), ("other", GONE, 1)]),
        ({"a": None}, "dict", lambda held: held.update(a=2), [("a", None, 2)]),
        ([1, 2], "list", lambda held: held.reverse(), [(0, 1, 2), (1, 2, 1)]),
    ],
)
def test_what_has_changed_is_told_by_key(value, kind, change, expected):
    assert changed(value, kind, change) == expected


class Scaled(nn.Linear):
    scale = 1.0

    def __init__(self):
        super().__init__(2, 2)
        self.rate, self.unread = 1.0, 0


def looking(*values):
    held = [
        Holder(v, "object" if isinstance(v, nn.Module) else type(v).__name__, "") for v in values
    ]
    weight = torch.zeros(2)
    return Look(held, {"p"}, [weight]), weight


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (nn.Dropout(0.5), lambda it: setattr(it, "p", 0.1)),
        (Scaled(), lambda it: setattr(it, "rate", 2.0)),
        (Scaled(), lambda it: setattr(it, "rate", True)),  # equal, and of another type
        (Scaled(), lambda it: setattr(it, "scale", 2.0)),  # its class has the value so far
        (Scaled(), lambda it: delattr(it, "rate")),
        ({"a": 1.0}, lambda it: it.update(a=2.0)),
        ({"old": 1.0}, renamed),
        ([1.0, 2.0], lambda it: it.reverse()),
        ([1.0, 2.0], lambda it: it.append(2.0)),
    ],
)
def test_a_look_sees_each_change(value, change):
    look, _ = looking(value, Scaled())
    assert look.is_same()
    change(value)
    assert not look.is_same()
    changed = look.changed()
    assert value in [holder.value for holder in changed]
    look.renew(changed)
    assert look.is_same()
    assert look.changed() == []


def test_a_look_sees_writes_to_tensors_and_not_what_torchs_own_code_does_not_read():
    layer = nn.Linear(2, 2)
    look, weight = looking(layer)
    layer.in_features = 5
    assert look.is_same()
    weight.add_(1)
    assert not look.is_same()
