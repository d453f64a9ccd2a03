"""What `explain` says of memory that workers share."""

import pytest

from pipedream_rt.coordinator.views.explanation import _of_memory


@pytest.mark.parametrize(
    ("workers", "places", "said"),
    [
        ("ab", ("", ""), None),
        ("ab", (), None),
        ("a", ("here",), None),
        ("aa", ("here", "here"), None),  # one process does the work of both
        ("abc", ("here", "here", "here"), "share, smaller ones over sockets"),
        ("abc", ("here", "here", ""), "share, among a, b; smaller ones, and those to other"),
        ("abcd", ("x", "x", "y", "y"), "share, among a, b and among c, d; smaller ones"),
        ("abcd", ("x", "y", "x", "z"), "share, among a, c; smaller ones"),
        ("abcdefg", ("x",) * 5 + ("y",) * 2, "share, among a to e and among f, g; smaller ones"),
        ("aabb", ("x", "x", "x", "x"), "share, smaller ones over sockets"),
    ],
)
def test_it_says_which_workers_share_memory(workers, places, said):
    lines = _of_memory(workers, places)
    assert len(lines) == (said is not None)
    assert all(said in line for line in lines)
