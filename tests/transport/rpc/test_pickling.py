"""The pickler of torch RPC: what is not signed or not allowed is refused before it is read."""

import os
import pickle
import random

import pytest
import torch

from pipedream_rt.errors import TransportError
from pipedream_rt.transport.rpc.endpoint import _part
from pipedream_rt.transport.rpc.pickling import SignedPickler

KEY = b"k" * 32


class Bomb:
    """Runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def udf(function, *arguments):
    from torch.distributed.rpc.internal import PythonUDF

    return PythonUDF(function, arguments, {})


def test_a_request_of_a_stranger_is_not_unpickled(tmp_path):
    """torch's own pickler would have run it."""
    bomb = tmp_path / "bomb"
    ours = SignedPickler(KEY)
    strangers = SignedPickler(b"x" * 32)
    for data in (pickle.dumps(Bomb(bomb)), strangers.serialize(udf(os.mkdir, str(bomb)))[0], b""):
        with pytest.raises(TransportError, match=r"not signed with the key"):
            ours.deserialize(data, [])
    assert not bomb.exists()


def test_a_member_cannot_have_other_functions_called(tmp_path):
    """Defence in depth: the key alone is not enough."""
    ours, member = SignedPickler(KEY), SignedPickler(KEY)
    with pytest.raises(TransportError, match=r"names posix\.getcwd, which is not allowed"):
        ours.deserialize(*member.serialize(udf(os.getcwd)))
    with pytest.raises(TransportError, match=r"posix\.mkdir, which is not allowed"):
        ours.deserialize(*member.serialize(udf(_part, Bomb(tmp_path / "bomb"))))
    request = ours.deserialize(*member.serialize(udf(_part, 0, [torch.ones(2)])))
    assert request.func is _part
    assert torch.equal(request.args[1][0], torch.ones(2))


def test_other_tensors_than_those_signed_are_refused():
    ours, member = SignedPickler(KEY), SignedPickler(KEY)
    data, _ = member.serialize(udf(_part, 0, [torch.ones(2)]))
    with pytest.raises(TransportError, match="are not those that were signed"):
        ours.deserialize(data, [torch.ones(3)])


def test_fuzz_of_the_unpickler():
    draw = random.Random(3)
    ours, member = SignedPickler(KEY), SignedPickler(KEY)
    good = member.serialize(udf(_part, 0, "module"))[0]
    ours.deserialize(good, [])
    for i in range(20_000):
        if i % 4 == 2:
            continue  # links count what comes, the pickler does not
        place = draw.randrange(len(good))
        junk = (draw.randbytes(place), good[:place], good, pickle.dumps(Bomb("/tmp/no")))[i % 4]
        with pytest.raises(TransportError):
            ours.deserialize(junk, [])
