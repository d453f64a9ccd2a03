"""What is pickled for a worker can be read where the script is not."""

import pickle
import sys
import types

import cloudpickle
import numpy as np
import pytest
import torch
from support import forked
from support.deadlines import LATEST_S

from pipedream_rt.models import shipping


def unpacked(monkeypatch, code, name):
    """What a script that multiprocessing has spawned defines, where that cannot be imported.

    There the script is called ``__mp_main__``, a name that no worker can import.
    """
    script = types.ModuleType("__mp_main__")
    monkeypatch.setitem(sys.modules, "__mp_main__", script)
    exec(code, vars(script))
    try:
        written, _ = shipping.dumps(vars(script)[name])
    finally:
        cloudpickle.unregister_pickle_by_value(script)
    monkeypatch.delitem(sys.modules, "__mp_main__")
    return cloudpickle.loads(written)


def test_classes_of_a_script_that_multiprocessing_has_spawned_travel(monkeypatch):
    code = "from torch import nn\nclass Layer(nn.Module):\n    width = 3\nlayer = Layer()\n"
    assert unpacked(monkeypatch, code, "layer").width == 3


@pytest.mark.parametrize(
    "value",
    [
        torch.nn.attention.SDPBackend.MATH,
        [torch.nn.attention.SDPBackend.FLASH_ATTENTION, torch.profiler.ProfilerActivity.CPU],
        torch.nn.attention.SDPBackend,
    ],
)
def test_enums_that_are_written_in_c_travel(value):
    """The class of the first has another name of its own than the one under which it stands."""
    assert shipping.loads(shipping.dumps(value)[0]) == value


@pytest.mark.parametrize("value", [torch.finfo(torch.bfloat16), torch.iinfo(torch.int8)])
def test_limits_of_dtypes_travel(value):
    made = shipping.loads(shipping.dumps(value)[0])
    assert (type(made), made.max, made.bits) == (type(value), value.max, value.bits)


def test_a_class_that_has_its_own_name_goes_as_before():
    """By its code, for instance, where the script asks for that."""
    assert b"_attribute_of" in shipping.dumps(torch.nn.attention.SDPBackend)[0]
    for cls in (int, type(None), torch.nn.Linear, torch.profiler.ProfilerActivity):
        assert b"_attribute_of" not in shipping.dumps(cls)[0]
        assert shipping.loads(shipping.dumps(cls)[0]) is cls


def test_worker_processes_of_a_loader_do_not_travel():
    loader = torch.utils.data.DataLoader(range(4))
    loader._iterator = iter(loader)
    copied = shipping.loads(shipping.dumps(loader)[0])
    assert copied._iterator is None
    assert len(copied) == 4


def test_copies_are_made_of_a_value_as_it_is_and_share_what_is_large():
    small, large = torch.zeros(2), np.zeros(1 << 10)
    copy = shipping.copying({"small": small, "large": large, "list": [1]}, 1 << 10)
    for _ in range(2):
        made = copy()
        assert (made["small"].sum(), made["list"]) == (0, [1])
        made["small"] += 1
        made["large"] += 1
        made["list"].append(2)
    assert (small.sum(), large[0]) == (0, 2)


def test_no_copies_are_made_of_too_much(monkeypatch):
    words = list(map(str, range(1 << 20)))
    with pytest.raises(pickle.PicklingError, match="more than 1 MiB"):
        shipping.copying(words, 1 << 20)
    assert shipping.copying(words, 1 << 24)() == words
    monkeypatch.setattr(shipping, "_MOST_BUFFERS", 1)
    assert shipping.copying([torch.ones(1)], 1 << 10)() == [1]
    with pytest.raises(pickle.PicklingError, match="more than 1 tensors and arrays"):
        shipping.copying([torch.ones(1), torch.ones(1)], 1 << 10)


def test_a_cached_function_of_a_script_travels_with_an_empty_cache(monkeypatch):
    code = "import functools\n@functools.lru_cache(maxsize=3)\ndef table(n):\n    return 1 / n\n"
    made = unpacked(monkeypatch, f"{code}assert table(2) == 0.5\n", "table")
    assert made.cache_info()[2:] == (3, 0)
    assert made(4) == 0.25


SCRIPT = """
import functools

@functools.lru_cache
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)

add = functools.lru_cache(functools.partial(lambda a, b: a + b, 2))

@functools.singledispatch
def kind(value):
    return "other"

@kind.register
def _(value: int):
    return "int"

@kind.register(bool)
def _(value):
    return "bool"

class Table:
    @functools.cached_property
    def half(self):
        return 0.5

    @functools.lru_cache
    def over(self, n):
        return self.half / n

    @functools.singledispatchmethod
    def of(self, value):
        return kind(value)

    @of.register
    def _(self, value: str):
        return "str"

def used(n):
    table = Table()
    return fib(n), add(n), kind(n), kind(True), kind(1.5), table.over(n), vars(table), table.of("")
"""


def test_what_functools_wraps_in_a_script_travels():
    """Some of it has locks or weak references in it, some has no name."""
    script = types.ModuleType("__main__")
    exec(SCRIPT, vars(script))
    expected = script.used(10)
    written, _ = shipping.dumps(script.used)
    code = "import sys, pickle; print(pickle.loads(bytes.fromhex(sys.argv[1]))(10))"
    done = forked.run(
        [sys.executable, "-c", code, written.hex()], capture_output=True, text=True,
        timeout=LATEST_S,
    )  # fmt: skip
    assert done.stdout.strip() == repr(expected), done.stderr
    assert expected == (55, 12, "int", "bool", "other", 0.05, {"half": 0.5}, "str")
