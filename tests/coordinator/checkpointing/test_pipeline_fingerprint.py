"""The fingerprint of a whole pipeline, made of those of its stages."""

import dataclasses

import msgpack
import pytest

from pipedream_rt.coordinator.checkpointing.pipeline_fingerprint import Fingerprint, of_stages
from pipedream_rt.schedules import plan_for


def mark(number):
    return f"{number:032x}"


def found(number, rest=(), **changes):
    """What a stage says of its state."""
    made = {name: mark(number + i) for i, name in enumerate(("weights", "buffers", "optimizer"))}
    return {"version": 4, "rest": list(rest), "older": {3: mark(number + 3)}, **made, **changes}


def fingerprint(*stages):
    return Fingerprint.of_plain(stages)


def test_of_replicas_the_first_one_counts():
    plan = plan_for("async-1f1b", num_stages=2, replicas=[2, 1])
    same = found(10)
    replies = [same, {**same, "buffers": mark(99)}, found(20)]
    assert of_stages(plan, replies) == [same, found(20)]


def test_what_each_replica_keeps_for_its_own_steps_counts_once():
    plan = plan_for("async-1f1b", num_stages=2, replicas=[3, 1])
    parts = [found(10, rest, optimizer=mark(i)) for i, rest in enumerate(["ba", "a", "c"], 50)]
    stage, other = of_stages(plan, [*parts, found(20)])
    assert stage["rest"] == ["a", "b", "c"]
    assert stage["optimizer"] not in {part["optimizer"] for part in parts}
    assert {name: stage[name] for name in ("weights", "buffers")} == {
        name: parts[0][name] for name in ("weights", "buffers")
    }
    swapped = [parts[0], parts[2], parts[1], found(20)]
    assert of_stages(plan, swapped) == [stage, other]  # the order of the replicas says nothing


def test_the_digest_does_not_depend_on_the_split():
    """The sum of the parts is that of the whole; what stages have alike counts once."""
    one, two = found(10, ["a", "b"]), found(20, ["a"])
    whole = found(30, ["b", "a"], **{
        name: getattr(fingerprint(one, two), name) for name in ("weights", "buffers", "optimizer")
    })  # fmt: skip
    assert fingerprint(one, two).digest == fingerprint(whole).digest == str(fingerprint(two, one))
    assert fingerprint(one, two).first_difference(fingerprint(whole)) == ""
    assert fingerprint(one, found(20, ["c"])).digest != fingerprint(one, two).digest


@pytest.mark.parametrize("part", ["weights", "buffers", "optimizer", "rest"])
def test_every_part_is_in_the_digest_and_is_named(part):
    one = fingerprint(found(10, "a"), found(20, "a"))
    value = ("c",) if part == "rest" else mark(7)
    changed = dataclasses.replace(one.stages[1], **{part: value})
    other = Fingerprint((one.stages[0], changed))
    assert other.digest != one.digest
    assert one.first_difference(other) == f"stage 1: {part}"
    joined = Fingerprint((*one.stages, dataclasses.replace(changed, rest=("d",))))
    assert one.first_difference(joined).endswith("(of other splits)")


def test_an_older_version_that_differs_is_told_but_is_no_part_of_the_digest():
    one, other = fingerprint(found(10)), fingerprint(found(10, older={3: mark(1)}))
    assert one.first_difference(other) == "stage 0: older"
    assert one.digest == other.digest
    assert one.first_difference(one) == ""


def test_it_comes_back_from_a_manifest():
    """Where tuples have become lists, and the numbers of versions texts."""
    stage = found(10, ["a", "b"])
    packed = msgpack.packb({**stage, "older": {str(v): m for v, m in stage["older"].items()}})
    assert fingerprint(msgpack.unpackb(packed)) == fingerprint(stage)
