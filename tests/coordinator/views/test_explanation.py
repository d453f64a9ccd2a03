"""What `explain` says of memory that workers share."""

from dataclasses import replace

import pytest

from pipedream_rt.coordinator.views.explanation import _of_memory, _of_script
from pipedream_rt.schedules import plan_for


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


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((0, 0), ["outputs come to it, and gradients go back"]),
        ((4096, 1024), ["1 KiB of outputs come to it"]),
        ((1024, 4096), ["4 KiB of outputs come to it", "more than the 1 KiB of activations"]),
    ],
)
def test_it_says_what_crosses_to_a_script_that_computes_the_loss(sizes, said):
    plan, statistics = plan_for("gpipe", num_stages=2), [{"output_bytes": each} for each in sizes]
    assert _of_script(plan, statistics) == []
    lines = _of_script(replace(plan, loss_in_script=True), statistics)
    assert len(lines) == len(said)
    assert all(text in line for text, line in zip(said, lines, strict=True))
