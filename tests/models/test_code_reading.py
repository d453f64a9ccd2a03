"""What the code of a function names."""

import functools
import os

import torch
from torch import nn

from pipedream_rt.models.code_reading import (
    ENTRY,
    functions_called,
    methods_named,
    names_in,
    names_used,
)

SEEN, TOTAL = [], 0


def reads_here_and_inside(x):
    def inside(y):
        return torch.relu(y) + len(SEEN)

    return [inside(each) for each in x]


def test_globals_are_those_of_functions_inside_too():
    assert names_in(reads_here_and_inside.__code__).globals == {"torch", "len", "SEEN"}


def changes_all_kinds(x):
    global TOTAL
    TOTAL = x.size
    SEEN[0] = x
    x.label = os.environ["HOME"]


def test_what_is_set_is_told_by_kind_and_name():
    assert names_in(changes_all_kinds.__code__).stored == {"TOTAL", "label", ENTRY}


def imports_late():
    import json.decoder
    from os.path import join

    return join, json.decoder


def test_imports_inside_of_a_function_are_named():
    names = names_in(imports_late.__code__)
    assert names.imported == {"json.decoder", "os.path"}
    assert "join" in names.loaded


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


def test_methods_of_a_class_itself_are_found_by_name():
    found = methods_named(Layer, {"rate", "unused", "helper", "forward"})
    assert {each.__name__ for each in found} == {"rate", "unused", "forward"}


def two_words(self):
    return self.a.b + "two words"


def test_a_text_that_is_no_name_is_no_attribute():
    assert names_in(two_words.__code__).loaded == {"a", "b"}
    assert "two words" in names_in(two_words.__code__).texts
