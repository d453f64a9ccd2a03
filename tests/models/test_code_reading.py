"""What the code of a function reads and changes."""

import functools

import pytest
import torch
from torch import nn

from pipedream_rt.models.code_reading import (
    functions_called,
    globals_read,
    names_in,
    names_used,
    uses,
)

SEEN, TOTAL = [], 0


def reads_here_and_inside(x):
    def inside(y):
        return torch.relu(y) + len(SEEN)

    return [inside(each) for each in x]


def test_globals_are_those_of_functions_inside_too():
    assert globals_read(reads_here_and_inside) == {"torch", "len", "SEEN"}


def appends(x):
    SEEN.append(x)


def stores(x):
    SEEN[0] = x


def counts(x):
    global TOTAL
    TOTAL += x


def counts_and_reads(x):
    global TOTAL
    TOTAL += x
    return TOTAL


def reads(x):
    return x * SEEN[0]


def calls_another_method(x):
    SEEN.sort()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (appends, {("SEEN", True)}),
        (stores, {("SEEN", True)}),
        (counts, {("TOTAL", True)}),
        (counts_and_reads, {("TOTAL", False)}),
        (reads, {("SEEN", False)}),
        (calls_another_method, {("SEEN", False)}),
    ],
)
def test_to_add_to_something_is_not_to_read_it(function, expected):
    assert set(uses(function)) == expected


def test_so_it_is_in_a_closure():
    seen, total, own = [], 0, 1

    def adds(x):
        nonlocal total
        total += own
        seen.append(x)
        mine = [x]
        mine.append(own)

    assert set(uses(adds)) == {("seen", True), ("total", True), ("own", False)}


def noted(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


class Base(nn.Module):
    def helper(self):
        self.calls = self.start
        return getattr(self, "by_text")  # noqa: B009


class Layer(Base):
    def __init__(self):
        super().__init__()
        self.never_read = self.never_set = 0

    def forward(self, x):
        return self.helper() + self.rate + self.fixed(x) + self.wrapped()

    @property
    def rate(self):
        return self.of_property

    @staticmethod
    def fixed(x):
        return x.of_static

    @noted
    def wrapped(self):
        return self.of_wrapped

    def unused(self):
        self.of_unused = self.read_unused


def test_what_a_call_of_a_class_may_reach_is_found_by_names():
    found = [function.__name__ for function in functions_called(Layer)]
    assert found[0] == "forward"
    assert set(found) == {"forward", "helper", "rate", "fixed", "wrapped"}


def test_attributes_that_may_be_read_are_those_of_properties_and_texts_too():
    read, stored = names_used(Layer)
    assert {"start", "by_text", "of_property", "of_static", "of_wrapped"} <= read
    assert not read & {"never_read", "read_unused"}
    assert stored == {"calls"}


def test_other_methods_are_read_where_they_are_asked_for():
    assert names_used(Layer, "unused") == ({"read_unused"}, {"of_unused"})
    assert {"never_read", "never_set"} <= names_used(Layer, "__init__")[1]
    assert names_used(Layer, "no_such_method") == (frozenset(), frozenset())


def test_a_text_that_is_no_name_is_no_attribute():
    assert names_in(lambda self: self.a.b + "two words") == ({"a", "b"}, set())
