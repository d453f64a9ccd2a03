"""What a user may write is the same as in plain PyTorch, bit for bit, or refused with words."""

from pathlib import Path

import pytest
import torch
from support.compatibility import FIRST, LAYERS, LAZY, LOSSES, NOT_LAYERS, ROWS, judge, page
from torch import nn

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"

pytestmark = [
    pytest.mark.usefixtures("environment"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_sequence(row):
    judge(row, "serial")


@pytest.mark.thinned(2)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_given_whole(row):
    judge(row, "serial", whole=True)


def marked(row):
    """Rows on processes: those whose class is about what a process is sent, and one of each other.

    The rest runs in ``make stress``.
    """
    of_group = [each for each in ROWS if each.group == row.group]
    ours = row.group in ("values between stages", "mini-batches", "hyper-parameters", "contexts")
    here = ours or row is next(each for each in of_group if bool(each.refused) == bool(row.refused))
    return pytest.param(row, id=row.name, marks=[] if here else pytest.mark.stress)


@pytest.mark.thinned(2)
@pytest.mark.processes
@pytest.mark.parametrize("row", [marked(row) for row in ROWS])
def test_on_processes(row):
    judge(row, "local")


def test_every_class_of_torch_has_a_row():
    known = {*LAYERS, *FIRST, *LAZY, *LOSSES, *NOT_LAYERS}
    layers = {
        name
        for name in dir(nn)
        if isinstance(getattr(nn, name), type) and issubclass(getattr(nn, name), nn.Module)
    }
    assert layers - known == set()
    whats = " ".join(row.what for row in ROWS)
    for module in (torch.optim, torch.optim.lr_scheduler):
        base = torch.optim.Optimizer if module is torch.optim else module.LRScheduler
        for name in dir(module):
            cls = getattr(module, name)
            if isinstance(cls, type) and issubclass(cls, base) and cls is not base:
                assert name.startswith("_") or name in whats, name


def test_the_page_is_the_table():
    assert PAGE.read_text() == page(), "python -m support.compatibility > ../docs/compatibility.md"
