"""What `make test` leaves to `make stress` is there."""

from pathlib import Path

import pytest
from support.selection import EVERY

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize("name", EVERY)
def test_a_test_that_is_left_out_exists(name):
    path, _, function = name.partition("::")
    assert f"\ndef {function}(" in (ROOT / path).read_text()
