"""The codecs of the edges of a plan, from what a script gives."""

import pytest
from torch import nn

from pipedream_rt import ConfigError
from pipedream_rt.codecs import (
    BFloat16,
    ByteCodec,
    Float16,
    GraphCodec,
    Int8,
    OutsideGraph,
    Projection,
    TopK,
)
from pipedream_rt.job.codecs import Codecs, codecs_of
from pipedream_rt.schedules import plan_for

PLAN = plan_for("async-1f1b", num_stages=4)
ALONE = plan_for("async-1f1b", num_stages=1)


def test_a_codec_for_all_is_that_of_every_edge():
    codec = Int8()
    assert codecs_of(codec, PLAN).of_bytes == {(0, 1): codec, (1, 2): codec, (2, 3): codec}
    assert codecs_of(None, PLAN) == codecs_of({}, PLAN) == Codecs({}, {})
    assert codecs_of(codec, ALONE) == Codecs({}, {})


def test_an_edge_may_have_one_of_each_kind_and_that_of_the_graph_acts_first():
    graph, packs = Projection(16, 4), Int8()
    found = codecs_of({(1, 2): [packs, graph]}, PLAN)
    assert found.of((1, 2)) == [graph, packs]
    assert found.of((0, 1)) == []
    assert found.texts() == {(1, 2): f"{graph!r}, {packs!r}"}


def test_a_codec_of_the_graph_for_one_way_stays_outside_and_keeps_its_name():
    codec = BFloat16("backward")
    found = codecs_of({(0, 1): codec}, PLAN)
    assert not found.of_graph
    assert type(found.of_bytes[0, 1]) is OutsideGraph
    assert found.texts(lambda given: [type(each).__name__ for each in given]) == {
        (0, 1): "BFloat16"
    }


def test_the_text_of_an_edge_is_cut_where_a_manifest_would_grow():
    found = codecs_of(Int8(), PLAN)
    assert {len(text) for text in found.texts(lambda given: ["x" * 5000]).values()} == {1000}


@pytest.mark.parametrize(
    ("codec", "feeds"),
    [
        (TopK(feedback=True), True),
        (TopK(feedback=False), False),
        (Int8(direction="forward", feedback=True), False),
        (Int8(direction="backward", feedback=True), True),
        (Float16(), False),
    ],
    ids=repr,
)
def test_gradients_are_fed_back_by_codecs_with_feedback_that_code_gradients(codec, feeds):
    assert codecs_of({(0, 1): codec}, PLAN).feeds_gradients_back is feeds


def test_rules_are_there_for_codecs_of_bytes_alone():
    assert codecs_of(Float16(), PLAN).rules == ()
    assert len(codecs_of(Int8(), PLAN).rules) == 1


class Copies(ByteCodec):
    def pack(self, tensor):
        return (tensor.clone(),)

    def unpack(self, parts, shape, dtype):
        return parts[0]


class Elsewhere(Copies):
    direction = "up"


class Sparse(Copies):
    def pack(self, tensor):
        return (tensor.to_sparse(),)


class Learns(nn.Linear, GraphCodec):
    """Has weights of its own."""

    def __init__(self):
        super().__init__(2, 2)


class Cuts(GraphCodec):
    """Lets no gradient through."""

    def encode(self, tensor):
        return tensor.detach().clone()

    def decode(self, coded, shape, dtype):
        return coded


class Counts(Copies):
    tried = 0

    def pack(self, tensor):
        self.tried += 1
        return super().pack(tensor)


def test_a_codec_of_all_edges_is_tried_once():
    codec = Counts()
    codecs_of(codec, PLAN)
    once = codec.tried
    codecs_of({(0, 1): codec}, PLAN)
    assert codec.tried == 2 * once > 0


@pytest.mark.parametrize(
    ("codecs", "words"),
    [
        (Int8, r"call it: Int8\(\)"),
        ("int8", "must be codecs of pipedream_rt.codecs"),
        ("auto", "which links are slow is not known here"),
        ({(0, 3): Int8()}, r"the edges between stages are \(0, 1\), \(1, 2\), \(2, 3\)"),
        ({0: Int8()}, "has the edge 0"),
        ([Int8(), TopK()], "two of one kind"),
        ([BFloat16(), Projection(16, 4)], "two of one kind"),
        ({(0, 1): None}, "not None"),
        (Elsewhere(), "the direction of a codec"),
        (Learns(), "has parameters"),
        (Cuts(), "no gradient comes back"),
        (Sparse(), "tuple of dense tensors"),
    ],
)
def test_what_is_no_codec_is_refused_before_anything_starts(codecs, words):
    with pytest.raises(ConfigError, match=words):
        codecs_of(codecs, PLAN)


@pytest.mark.parametrize("codecs", ["int8", Int8])
def test_with_one_stage_too(codecs):
    with pytest.raises(ConfigError, match="must be codecs"):
        codecs_of(codecs, ALONE)
    with pytest.raises(ConfigError, match="none, as there is one stage"):
        codecs_of({(0, 1): Int8()}, ALONE)
