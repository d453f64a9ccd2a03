"""The faults that `make mutants` seeds."""

import ast

import pytest
from support.mutants.faults import KINDS, chosen, faults_of, with_fault

TEXT = """
class Ring:
    def put(self, key, value):
        if len(self.items) >= self.size and not self.open:
            raise ValueError("full")
        self.check(key, value)
        self.log.debug("put %s", key)
        self.items[key + 1] = value
        return self.items[0] if key else None

    def __repr__(self):
        return "Ring" if self.items else "()"

LIMIT = 3 + 1
"""

EXPECTED = [
    ("condition", "len(self.items) >= self.size and not self.open",
     "not (len(self.items) >= self.size and not self.open)"),
    ("condition", " and ", " or "),
    ("condition", " >= ", " > "),
    ("error", 'raise ValueError("full")', "pass"),
    ("call", "self.check(key, value)", "pass"),
    ("arguments", "key, value", "value, key"),
    ("off by one", " + ", " - "),
    ("condition", "key", "not (key)"),
    ("off by one", "0", "1"),
]  # fmt: skip


def test_the_faults_of_a_function():
    found = faults_of("ring.py", TEXT)
    assert [(f.kind, f.before, f.after) for f in found] == EXPECTED
    assert {(f.function, f.entry) for f in found} == {("Ring.put", 3)}


@pytest.mark.parametrize("number", range(len(EXPECTED)))
def test_a_fault_changes_its_place_alone(number):
    fault, place = list(faults_of("ring.py", TEXT).items())[number]
    changed = with_fault(TEXT, place, fault)
    ast.parse(changed)
    lines = list(zip(TEXT.splitlines(), changed.splitlines(), strict=True))
    assert [n for n, (old, new) in enumerate(lines, 1) if old != new] == [fault.line]


def test_text_that_is_not_ascii_is_found_at_its_place():
    text = 'def f(a, b):\n    g("é", "ü"); return h(a, b)\n'
    (call, swapped) = faults_of("f.py", text).items()
    assert with_fault(text, swapped[1], swapped[0]).endswith("return h(b, a)\n")
    assert with_fault(text, call[1], call[0]).endswith("    pass; return h(a, b)\n")


def test_all_kinds_are_chosen_and_a_change_elsewhere_chooses_no_others():
    text = "".join(TEXT.replace("put", f"put{n}").replace("Ring", f"Ring{n}") for n in range(30))
    few = chosen(faults_of("ring.py", text), 20)
    assert {fault.kind for fault in few} == set(KINDS)
    moved = chosen(faults_of("ring.py", "import os\n\n" + text), 20)
    assert [fault.key for fault in moved] == [fault.key for fault in few]
