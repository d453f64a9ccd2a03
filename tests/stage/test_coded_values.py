"""Values that cross an edge encoded: which, what crosses in their place, and what comes back."""

import pytest
import torch

from pipedream_rt.codecs import GraphCodec
from pipedream_rt.errors import ConfigError
from pipedream_rt.messages.tree import flatten, unflatten
from pipedream_rt.stage.coded_values import Encoded, GraphCoding


class Halves(GraphCodec):
    """Keeps the first half of the last dimension, doubled."""

    def encode(self, tensor):
        return tensor.chunk(2, -1)[0] * 2

    def decode(self, coded, shape, dtype):
        return torch.cat([coded, coded], -1).to(dtype)


class Returns(GraphCodec):
    """Encodes and decodes as it is told."""

    def __init__(self, encode=lambda tensor: tensor, decode=lambda coded: coded):
        self.encode = encode
        self._decode = decode

    def decode(self, coded, shape, dtype):
        return self._decode(coded)


def ends(codec, autocast=None):
    """Stages 1 and 2, with a codec between them; stage 1 has no other."""
    return [GraphCoding({(1, 2): codec, (4, 5): codec}, stage, autocast) for stage in (1, 2)]


def test_a_value_without_a_codec_on_its_edge_is_the_very_same():
    sender, receiver = ends(Halves())
    x = torch.ones(2, 4)
    assert sender.encoded(3, x) is x
    assert receiver.decoded(1, x) is x
    encoded = sender.encoded(2, x)
    assert receiver.decoded(0, encoded) is encoded


def test_only_what_the_codec_takes_is_encoded_and_the_value_keeps_its_form():
    sender, receiver = ends(Halves())
    x, count = torch.arange(8.0).view(2, 4), torch.ones(2, 2, dtype=torch.int32)
    value = {"x": x, "row": torch.ones(3), "count": (count, "text")}
    encoded = sender.encoded(2, value)
    assert encoded.was == [["float32", [2, 4]], [], []]
    found = receiver.decoded(1, encoded)
    assert found["x"].tolist() == [[0, 2, 0, 2], [8, 10, 8, 10]]
    assert found["row"] is value["row"]
    assert found["count"] == (count, "text")


def test_the_dtype_comes_back_and_the_gradient_goes_through_both_halves():
    sender, receiver = ends(Halves())
    x = torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True)
    found = receiver.decoded(1, sender.encoded(2, x))
    assert found.dtype is torch.bfloat16
    found.sum().backward()
    assert x.grad.tolist() == [[4, 4, 0, 0]] * 2


def test_what_is_encoded_can_be_sent_as_a_value():
    sender, receiver = ends(Halves())
    x = torch.randn(2, 4)
    arrived = unflatten(*flatten(sender.encoded(2, x)))
    assert isinstance(arrived, Encoded)
    assert torch.equal(receiver.decoded(1, arrived), (2 * x[:, :2]).repeat(1, 2))


def test_a_layer_may_change_what_it_is_given_and_not_what_has_come():
    sender, receiver = ends(Returns())
    encoded = sender.encoded(2, torch.ones(2, 4))
    receiver.decoded(1, encoded).zero_()
    assert encoded.tensors[0].tolist() == [[1] * 4] * 2


def test_micro_batches_that_are_trained_on_are_counted():
    sender, _ = ends(Halves())
    for _ in range(3):
        sender.encoded(2, torch.ones(2, 4))
    with torch.no_grad():
        sender.encoded(2, torch.ones(2, 4))
    assert sender.statistics() == {"encoded": [[1, 2, "forward", 3, 3 * 32, 3 * 16]]}


def test_autocast_does_not_reach_into_a_codec():
    weight, dtypes = torch.ones(4, 4), []

    def encode(tensor):
        dtypes.append((tensor @ weight).dtype)
        return tensor

    sender, _ = ends(Returns(encode), "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        sender.encoded(2, torch.ones(2, 4))
        assert (torch.ones(2, 4) @ weight).dtype is torch.bfloat16
    assert dtypes == [torch.float32]


def fails(tensor):
    raise ZeroDivisionError("its own words")


@pytest.mark.parametrize(
    ("codec", "error", "words"),
    [
        (Returns(encode=fails), RuntimeError, "ZeroDivisionError: its own words"),
        (Returns(decode=fails), RuntimeError, "ZeroDivisionError: its own words"),
        (Returns(encode=torch.Tensor.int), ConfigError, "must encode as a floating-point tensor"),
        (Returns(decode=lambda coded: coded[0]), ConfigError, "must give back the shape"),
    ],
    ids=["encode", "decode", "integers", "shape"],
)
def test_what_goes_wrong_names_the_edge(codec, error, words):
    sender, receiver = ends(codec)
    with pytest.raises(error, match=f"the edge 1 -> 2: the codec .*Returns.* {words}"):
        receiver.decoded(1, sender.encoded(2, torch.ones(2, 4)))
