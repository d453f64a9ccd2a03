"""Projections: what arrives of values that cross with fewer columns."""

import pytest
import torch

from pipedream_rt.codecs import Projection, learned_projection
from pipedream_rt.codecs.projection import orthonormal
from pipedream_rt.errors import ConfigError


def test_a_projection_onto_all_columns_loses_nothing():
    tensor = torch.randn(6, 16, dtype=torch.float64)
    codec = Projection(16, 16)
    found = codec.decode(codec.encode(tensor), tensor.shape, tensor.dtype)
    assert torch.allclose(found, tensor, atol=1e-6)
    basis = torch.eye(16)[:, :3]
    codec = Projection(16, 3, basis=basis)
    found = codec.decode(codec.encode(tensor), tensor.shape, tensor.dtype)
    assert torch.equal(found[:, :3], tensor[:, :3])
    assert found[:, 3:].eq(0).all()
    assert not codec.takes(torch.randn(6, 17))


def test_a_learned_projection_begins_as_an_orthonormal_one():
    narrow, wide = learned_projection(16, 4)
    assert torch.allclose(narrow(wide.weight.T), torch.eye(4), atol=1e-6)
    assert torch.equal(narrow.weight, wide.weight.T)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Projection(16, 17), "not 16 and 17"),
        (lambda: Projection("16", 4), "not '16' and 4"),
        (lambda: Projection(16, 4, basis=torch.eye(4)), "shape"),
        (lambda: Projection(16, 4, dtype=torch.int8), "floating"),
        (lambda: Projection(16, 4, basis=[[1.0]]), "must be a tensor"),
        (lambda: Projection(16, 0), "not 16 and 0"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_columns_cross_in_the_dtype_that_was_asked_for_and_arrive_in_their_own():
    tensor = torch.randn(2, 3, 16)
    codec = Projection(16, 4, dtype=torch.bfloat16)
    coded = codec.encode(tensor)
    assert (coded.shape, coded.dtype) == ((2, 3, 4), torch.bfloat16)
    found = codec.decode(coded, tensor.shape, tensor.dtype)
    assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
    assert Projection(16, 4).encode(tensor.double()).dtype is torch.float64


def test_what_lies_in_the_basis_crosses_whole():
    basis = orthonormal(16, 4)
    inside = torch.randn(5, 4) @ basis.T
    codec = Projection(16, 4)
    found = codec.decode(codec.encode(inside), inside.shape, inside.dtype)
    torch.testing.assert_close(found, inside)


def test_a_basis_is_that_of_its_seed_and_draws_nothing_of_the_script():
    """A checkpoint compares codecs by what they print."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert repr(Projection(16, 4, seed=1)) == repr(Projection(16, 4, seed=1))
    assert repr(Projection(16, 4, seed=1)) != repr(Projection(16, 4, seed=2))
    assert torch.equal(torch.get_rng_state(), before)
    assert "direction='forward'" in repr(Projection(16, 4, direction="forward"))
