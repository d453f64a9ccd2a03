"""msgpack takes each text that Python has."""

from pathlib import Path

import pytest
from support.rooms import library_files

from pipedream_rt.packing import Unpacker, packb, unpackb

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("text", ["", "café", "caf\udce9", "\ud800\udc00", "\udfff"])
def test_a_text_comes_back_as_it_was(text):
    value = {text: [text, 1.5, b"\xe9", None]}
    assert unpackb(packb(value)) == value
    unpacker = Unpacker()
    unpacker.feed(packb(value))
    assert unpacker.unpack() == value


def test_the_library_packs_in_no_other_way():
    for path in library_files(ROOT):
        if path.name != "packing.py":
            for call in ("packb", "unpackb", "Unpacker"):
                assert f"msgpack.{call}" not in path.read_text(), path
