"""What crosses an edge is packed: which tensors, with which residuals, and what is kept of them."""

import dataclasses
import math

import pytest
import torch
from support.rules import context
from torch import nn

from pipedream_rt.codecs import ByteCodec
from pipedream_rt.messages.state_keys import StateKey, by_text
from pipedream_rt.schedules import Edge, EdgeKind, plan_for
from pipedream_rt.stage.rules.coding import EdgeCodecs
from pipedream_rt.stage.rules.rule import Update


@dataclasses.dataclass(frozen=True)
class Whole(ByteCodec):
    """Packs the whole part of numbers and, beside it, their number."""

    feedback: bool = True
    direction: str = "both"

    def pack(self, tensor):
        return tensor.trunc().to(torch.int32), torch.tensor(tensor.numel())

    def unpack(self, parts, shape, dtype):
        return parts[0].to(dtype)


LAYERS = (("a", "b"), ("c",), ("d", "e"))
FORWARD, BACKWARD = Edge(EdgeKind.ACTIVATION, 1, 2), Edge(EdgeKind.GRADIENT, 1, 0)
"""On which stage 1 sends."""


def coding(codec=None, stage=1, layers=LAYERS, address=None, **options):
    plan = plan_for("async-1f1b", num_stages=len(layers), **options)
    plan = dataclasses.replace(plan, layers=layers)
    edges = {(stage - 1, stage), (stage, stage + 1)}
    made = EdgeCodecs(dict.fromkeys(edges, codec or Whole()))
    return made.rule(context(nn.Linear(1, 1), plan, stage, address))


def full(number):
    return torch.full((1, 2), float(number))


def sent(rule, numbers, edge=FORWARD, first=0):
    """What the receiver has of numbers that are packed in micro-batches one after another."""
    found = []
    for m, number in enumerate(numbers, first):
        tensors, coded = rule.packed(edge, m, (full(number),), [0])
        found.append(rule.unpacked(edge, tensors, coded)[0][0, 0].item())
    return found


def test_only_what_has_a_place_and_what_the_codec_takes_is_packed():
    rule = coding()
    row, count = torch.ones(3), torch.ones(2, 2, dtype=torch.int64)
    given = (full(1.5), full(2.5), row, count, full(3.5))
    tensors, coded = rule.packed(FORWARD, 0, given, [None, 1, 2, 3, 4])
    assert coded == [[], [2, "float32", [1, 2]], [], [], [2, "float32", [1, 2]]]
    assert [t.numel() for t in tensors] == [2, 2, 1, 3, 4, 2, 1]
    assert tensors[0] is given[0]
    found = rule.unpacked(FORWARD, tensors, coded)
    assert [t.tolist() for t in found] == [
        [[1.5, 1.5]], [[2, 2]], [1, 1, 1], [[1, 1], [1, 1]], [[3, 3]],
    ]  # fmt: skip


def test_where_nothing_is_packed_nothing_is_said_of_it():
    rule = coding()
    row = torch.ones(3)
    assert rule.packed(FORWARD, 0, (row,), [0]) == ((row,), [])
    assert rule.packed(FORWARD, 0, (), []) == ((), [])


def test_what_packing_has_lost_is_added_to_the_next_tensor_of_the_edge():
    numbers = [0.5, 0.75, 0.5, 0.25]
    assert sent(coding(), numbers) == [0, 1, 0, 1]
    assert sent(coding(Whole(feedback=False)), numbers) == [0, 0, 0, 0]


def test_each_edge_and_each_place_has_its_own_residuals():
    rule = coding()
    assert sent(rule, [0.5], FORWARD) == [0]
    assert sent(rule, [0.75], BACKWARD) == [0]
    assert sent(rule, [0.25], BACKWARD, first=1) == [1]
    tensors, coded = rule.packed(FORWARD, 1, (full(0.5), full(0.5)), [1, 0])
    assert [t[0, 0].item() for t in rule.unpacked(FORWARD, tensors, coded)] == [0, 1]


@pytest.mark.parametrize(
    "other", [torch.full((2, 2), 0.75), torch.full((1, 2), 0.75, dtype=torch.float64)],
    ids=["shape", "dtype"],
)  # fmt: skip
def test_a_tensor_of_another_form_begins_anew(other):
    rule = coding()
    sent(rule, [0.75])
    tensors, coded = rule.packed(FORWARD, 1, (other,), [0])
    assert not rule.unpacked(FORWARD, tensors, coded)[0].any()


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_what_is_not_finite_does_not_spoil_what_comes_later(odd):
    class Same(Whole):
        def pack(self, tensor):
            return (tensor.nan_to_num(0, 0),)

    assert sent(coding(Same()), [odd, 3.0]) == [0, 3]


@pytest.mark.parametrize(("direction", "packs"), [("forward", FORWARD), ("backward", BACKWARD)])
def test_a_codec_of_one_direction_leaves_the_other_alone(direction, packs):
    rule = coding(Whole(direction=direction))
    for edge in (FORWARD, BACKWARD):
        tensors, coded = rule.packed(edge, 0, (full(1.5),), [0])
        assert bool(coded) == (edge is packs) == (len(tensors) == 2)
    way = {FORWARD: [1, 2, "forward"], BACKWARD: [0, 1, "backward"]}[packs]
    assert rule.statistics() == {"packed": [[*way, 1, 8, 16]]}


def test_a_checkpoint_has_the_residuals_before_later_mini_batches():
    rule = coding()
    sent(rule, [0.25, 0.25, 0.25])  # of the mini-batches 0, 1 and 2
    key = "codecs/b -> c/gradient/#0/#0/#0"
    sent(rule, [0.5], BACKWARD)
    rule.after(Update(0, [], [], []), None)
    found = {name: tensor[0, 0].item() for name, tensor in by_text(rule.state()).items()}
    assert found == {"codecs/c -> d/activation/#0/#0/#0": 0.25, key: 0.5}
    rule.after(Update(1, [], [], []), None)
    assert by_text(rule.state())["codecs/c -> d/activation/#0/#0/#0"][0, 0] == 0.5


def test_a_mini_batch_of_which_a_replica_has_nothing_has_residuals_too():
    rule = coding(per_update=1, replicas=[1, 2, 1], address=2)
    edge = Edge(EdgeKind.ACTIVATION, 2, 3)
    sent(rule, [0.25], edge, first=1)
    sent(rule, [0.25], edge, first=3)
    seen = []
    for number in range(4):
        seen.append([tensor[0, 0].item() for tensor in rule.state().values()])
        rule.after(Update(number, [], [], []), None)
    assert seen == [[], [], [0.25], [0.25]]


def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_not_ended():
    numbers = [0.5, 0.25, 0.5, 0.75, 0.25, 0.5]
    rule, again = coding(), coding()
    whole = sent(rule, numbers[:3])
    for number in range(3):
        rule.after(Update(number, [], [], []), None)
    again.load_state(rule.state(), 3)
    whole += sent(rule, numbers[3:], first=3)
    assert sent(again, numbers[3:], first=3) == whole[3:]


def test_residuals_go_on_where_the_same_layers_are_at_the_ends_of_an_edge():
    rule = coding()
    sent(rule, [0.75])
    sent(rule, [0.75], BACKWARD)
    rule.after(Update(0, [], [], []), None)
    state = rule.state()
    # Now c is the end of stage 0, and what was stage 2 is stage 1.
    other = coding(stage=0, layers=(("a", "b", "c"), ("d",), ("e",)))
    other.load_state(state, 1)
    assert sent(other, [0.25], Edge(EdgeKind.ACTIVATION, 0, 1), first=1) == [1]
    assert list(other.state()) == [StateKey("codecs", "c -> d", ("activation", 0, 0, 0))]


def test_residuals_of_others_are_left_out():
    rule = coding()
    keys = [
        StateKey("codecs", "x -> y", ("activation", 0, 0, 0)),  # no edge of this split
        StateKey("codecs", "b -> c", ("activation", 0, 0, 0)),  # stage 0 sends on it
        StateKey("codecs", "c -> d", ("activation", 1, 0, 0)),  # there is no second replica
        StateKey("optimizer", "c -> d", ("exp_avg",)),
    ]
    rule.load_state(dict.fromkeys(keys, full(0.75)), 1)
    assert rule.state() == {}
    without = coding(Whole(feedback=False))
    without.load_state({StateKey("codecs", "c -> d", ("activation", 0, 0, 0)): full(0.75)}, 1)
    assert without.state() == {}


def test_an_error_of_a_codec_names_the_edge():
    class Fails(Whole):
        def pack(self, tensor):
            raise ZeroDivisionError("its own words")

    words = (
        "gradient from stage 1 to stage 0: the codec .*Fails.* raised ZeroDivisionError: its own"
    )
    with pytest.raises(RuntimeError, match=words):
        coding(Fails()).packed(BACKWARD, 0, (full(1),), [0])


def test_a_codec_of_several_edges_is_told_of_once():
    one, two = Whole(), Whole()
    assert EdgeCodecs({(0, 1): one, (1, 2): two, (2, 3): one}).things() == (one, two)
