"""The linter's rule for docstrings finds what breaks it; `make lint` asks it of the library."""

import pytest
from support import docstrings

ADDED = '''
def add(a, b):
    """Add them.

    Args:
        a: One.
    """
'''
BUILT = '''
class Adder:
    def __init__(self):
        """Know everything."""
'''
REFERS = '''
def add(a):
    """See `Other.add`."""
'''
REPEATS = '''
def close_link(link):
    """Close the link."""
'''
UNIT = '''
class Sums:
    """Sums.

    Attributes:
        at: In seconds.
    """

    at: float
'''
LISTED = '''
class Sums:
    """Sums.

    Attributes:
        before: In seconds.
    """

    after: float
'''
BARE = """
def add(a, b):
    return a + b
"""
FACE = '''
class Pipeline:
    """The face."""
    def step(self):
        return 0
'''


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        (ADDED, "add: sections are for users"),
        (BUILT, "Adder.__init__: its class has the docs"),
        (REFERS, "add: what it overrides has the docs"),
        (REPEATS, "close_link: its docs say no more than its name"),
        (FACE, "Pipeline.step is public and has no docs"),
        (LISTED, "Sums: its docs list before, which is not there"),
        (UNIT, None),
        (BARE, None),
    ],
)
def test_what_breaks_the_rule_is_found(source, wrong, monkeypatch, tmp_path):
    path = tmp_path / "pipeline.py"
    path.write_text(source)
    monkeypatch.setattr(docstrings, "sources", lambda: [path])
    monkeypatch.setattr(docstrings, "public", lambda: {(path, "Pipeline")})
    found = [text for *_, text in docstrings.complaints()]
    assert len(found) == (wrong is not None)
    assert wrong is None or found[0].startswith(wrong)
