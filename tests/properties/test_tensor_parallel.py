"""A stage of which another process has half, by layers that hold their shards as parameters."""

import sys

import pytest
import torch
from support import forked, halved
from support.deadlines import LATEST_S


@pytest.mark.processes
def test_a_stage_on_two_processes_has_the_bits_of_one_program(tmp_path):
    """Which has the same halves: rows are added up over two processes there as well."""
    done = forked.run(
        [sys.executable, "-W", "ignore", halved.__file__, tmp_path], capture_output=True, text=True,
        timeout=LATEST_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for schedule in halved.SCHEDULES:
        states = {
            (in_pipeline, rank): torch.load(tmp_path / f"{schedule}-{in_pipeline}-{rank}.pt")
            for in_pipeline in (True, False)
            for rank in (0, 1)
        }
        for rank in (0, 1):
            ours, one_program = states[True, rank], states[False, rank]
            assert ours.keys() == one_program.keys()
            assert all(torch.equal(ours[name], one_program[name]) for name in ours)
        assert not torch.equal(states[True, 0]["1.up_weight"], states[True, 1]["1.up_weight"])
        assert torch.equal(states[True, 0]["0.weight"], states[True, 1]["0.weight"])
