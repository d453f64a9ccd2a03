"""Codecs by themselves: what they make of tensors, and what is refused."""

import pytest
import torch

from pipedream_rt.codecs import BFloat16, ByteCodec, Float16, GraphCodec, Int8, OutsideGraph, TopK
from pipedream_rt.errors import ConfigError
from pipedream_rt.stage.codec import require_same, try_out

SHAPES = [(1, 1), (4, 32), (2, 3, 64), (5, 7, 2, 9)]
BYTES = [
    Int8(),
    Int8("channel"),
    TopK(0.1),
    TopK(1.0),
    OutsideGraph(BFloat16("forward")),
    OutsideGraph(Float16("backward")),
]


def there_and_back(codec, tensor):
    return codec.unpack(codec.pack(tensor), tensor.shape, tensor.dtype)


@pytest.mark.parametrize("codec", BYTES, ids=repr)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_shape_and_the_dtype_come_back(codec, shape, dtype):
    tensor = torch.randn(shape).to(dtype)
    if not codec.takes(tensor):
        assert dtype is torch.bfloat16
        return
    found = there_and_back(codec, tensor)
    assert (found.shape, found.dtype) == (tensor.shape, dtype)
    assert found.is_contiguous()
    assert found.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("codec", BYTES, ids=repr)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_does_not_become_finite(codec, bad):
    tensor = torch.randn(4, 32)
    tensor[2, 5] = bad
    assert not there_and_back(codec, tensor).isfinite().all()


@pytest.mark.parametrize("codec", BYTES, ids=repr)
def test_a_tensor_of_another_layout_is_packed_by_its_elements(codec):
    tensor = torch.randn(32, 4).T
    assert torch.equal(there_and_back(codec, tensor), there_and_back(codec, tensor.contiguous()))


def test_int8_is_within_half_a_step():
    tensor = torch.randn(16, 64) * torch.logspace(-6, 6, 16)[:, None]
    step = tensor.abs().amax(1, keepdim=True) / 127
    assert ((there_and_back(Int8(), tensor) - tensor).abs() <= 0.51 * step).all()
    by_channel = Int8("channel")
    step = tensor.abs().amax(0, keepdim=True) / 127
    assert ((there_and_back(by_channel, tensor) - tensor).abs() <= 0.51 * step).all()
    assert there_and_back(Int8(), torch.zeros(3, 4)).eq(0).all()


def test_int8_takes_a_quarter_of_the_bytes():
    tensor = torch.randn(8, 512)
    assert sum(part.nbytes for part in Int8().pack(tensor)) == 8 * 512 + 8 * 4
    assert sum(part.nbytes for part in Int8("channel").pack(tensor)) == 8 * 512 + 512 * 4


def test_topk_keeps_the_largest_of_each_row():
    tensor = torch.tensor([[1.0, -5.0, 2.0, 4.0], [0.0, 0.0, 0.0, 0.0]])
    found = there_and_back(TopK(0.5), tensor)
    assert found.tolist() == [[0.0, -5.0, 0.0, 4.0], [0.0] * 4]
    assert [p.dtype for p in TopK(0.5).pack(tensor)] == [torch.float32, torch.int16]
    wide = torch.randn(1, 40_000)
    assert TopK(0.5).pack(wide)[1].dtype is torch.int32
    assert torch.equal(there_and_back(TopK(1.0), wide), wide)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Int8("column"), "row"),
        (lambda: Int8(direction="up"), "direction"),
        (lambda: BFloat16("there"), "direction"),
        (lambda: TopK(0), "above 0"),
        (lambda: TopK(1.5), "at most 1"),
        (lambda: TopK(True), "at most 1"),
        (lambda: Int8(feedback="no"), "True or False"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


class Packs(ByteCodec):
    """Packs as it is told, and unpacks the first part as it is."""

    def __init__(self, pack):
        self.pack = pack

    def unpack(self, parts, shape, dtype):
        return parts[0]


class Halves(GraphCodec):
    def encode(self, tensor):
        return tensor.half()

    def decode(self, coded, shape, dtype):
        return coded


def fails(tensor):
    raise ZeroDivisionError("the codec's own words")


@pytest.mark.parametrize(
    ("codec", "words"),
    [
        (
            Packs(lambda tensor: (tensor.flatten(),)),
            r"shape \(4, 32\) and made float32 of shape \(128,\)",
        ),
        (Halves(), "float32 of shape .* and made float16"),
        (Packs(lambda tensor: tensor), "tuple of dense tensors"),
        (Packs(fails), "the codec's own words"),
        (ByteCodec(), "NotImplementedError"),
    ],
)
def test_a_codec_that_cannot_work_is_refused_before_a_run(codec, words):
    with pytest.raises(ConfigError, match=words):
        try_out(codec, "codecs")


def test_what_is_no_tensor_is_refused_too():
    with pytest.raises(ConfigError, match="made a list"):
        require_same([1], torch.Size([1]), torch.float32, Int8(), "an edge")
