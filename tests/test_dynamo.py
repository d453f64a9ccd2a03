"""torch's compiler is imported where something is compiled, and nowhere else."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from support.deadlines import LATEST_S
from support.pinned import Flat as Pipeline
from torch import nn

from pipedream_rt import Training

OPTIMIZERS = sorted(
    name
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type)
    and issubclass(cls, torch.optim.Optimizer)
    and name not in ("Optimizer", "LBFGS", "SparseAdam")
)

ALONE = """
import hashlib, os, sys, torch
from pipedream_rt.dynamo import spare_dynamo

def trained(name):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4, 4))
    optimizer = getattr(torch.optim, name)([weight], lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        (weight ** 2).sum().backward()
        assert torch.is_grad_enabled()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    return hashlib.sha256(weight.detach().numpy().tobytes()).hexdigest()

names = sys.argv[1:]
plain = os.fork()  # the number of the process that does not spare it, which is 0 there
if plain:
    spare_dynamo()
    spare_dynamo()
found = [trained(name) for name in names]
assert ("torch._dynamo" in sys.modules) == (not plain)
if plain:
    import torch._dynamo  # from here on everything is as ever
    assert found == [trained(name) for name in names]
    assert os.waitpid(plain, 0)[1] == 0
print(*found)
"""


@pytest.mark.processes
def test_every_optimizer_of_torch_steps_to_the_same_bits_without_it():
    command = [sys.executable, "-W", "ignore", "-c", ALONE, *OPTIMIZERS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LATEST_S, check=True)
    found = ended.stdout.splitlines()
    assert found[0] == found[1]
    assert len(found[0].split()) == len(OPTIMIZERS) > 10


def is_imported(module):
    return "torch._dynamo" in sys.modules


@pytest.mark.processes
def test_workers_import_it_if_they_compile():
    model = [nn.Linear(4, 4) for _ in range(4)]
    data = [(torch.randn(8, 4), torch.randn(8, 4))] * 3
    adam = (torch.optim.Adam, {"lr": 0.01})
    options = {"stages": 2, "loss_fn": F.mse_loss, "optimizer": adam, "workers": "local"}
    with Pipeline(model, training=Training(compile={"backend": "eager"}), **options) as pipe:
        list(pipe.train_epoch(data))
        assert pipe.on_stages(is_imported) == [True, True]


FRESH = """
import sys, torch
import torch.nn.functional as F
from torch import nn
from pipedream_rt import Pipeline, Training

def is_imported(module):
    return "torch._dynamo" in sys.modules

for again in (False, True):
    with Pipeline(
        [nn.Linear(4, 4) for _ in range(4)], stages=2, loss_fn=F.mse_loss,
        optimizer=(torch.optim.AdamW, {"lr": 0.01}), training=Training(recompute=again),
    ) as pipe:
        print(pipe.on_stages(is_imported))
        list(pipe.train_epoch([(torch.randn(8, 4), torch.randn(8, 4))] * 3))
        pipe.evaluate([(torch.randn(8, 4), torch.randn(8, 4))])
        pipe.optimizer.state_dict()
        print(pipe.on_stages(is_imported), is_imported(None))
"""


@pytest.fixture(scope="module")
def told():
    command = [sys.executable, "-W", "ignore", "-c", FRESH]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LATEST_S, check=True)
    return ended.stdout.splitlines()


@pytest.mark.processes
def test_a_run_that_compiles_nothing_never_imports_it(told):
    assert told[:2] == ["[False, False]", "[False, False] False"]


@pytest.mark.processes
def test_workers_that_compute_activations_again_begin_with_it(told):
    """torch imports it at the first checkpoint; in a recovery each worker would do so anew."""
    assert told[2:] == ["[True, True]", "[True, True] False"]
