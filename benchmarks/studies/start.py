"""How long it takes to open a pipeline on local workers, beside what cannot be avoided.

Each line is a fresh process, in which ``import torch`` is timed, and then the opening of three
pipelines of linear layers, one after another. The program either calls `pipedream_rt.prepare()` at
its top, so that the process that forks workers is started there, or does not, so that it starts
with the first pipeline. With ``--model gpt2``, the pipeline is of GPT-2
(124 million parameters, from its config), whose build is timed too.

Prints a table, or with --json one JSON line for each.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

PROGRAM = """
import json, sys, time
%s
start = time.perf_counter()
import torch
found = {"import_torch_s": time.perf_counter() - start}
from pipedream_rt import Pipeline
import torch.nn.functional as F
from torch import nn
def opened(model, workers, **given):
    start = time.perf_counter()
    with Pipeline(model, stages=workers, optimizer=(torch.optim.AdamW, {"lr": 0.1}), **given):
        return time.perf_counter() - start
if sys.argv[1] == "gpt2":
    %s
    start = time.perf_counter()
    model = GPT2LMHeadModel(GPT2Config(use_cache=False))
    found["build_s"] = time.perf_counter() - start
    ids = torch.randint(50257, (4, 64))
    given = {"example": {"input_ids": ids, "labels": ids}}
else:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    given = {"loss_fn": F.mse_loss}
for name in ("first_s", "second_s", "third_s"):
    found[name] = opened(model, int(sys.argv[2]), **given)
print(json.dumps(found))
"""

BEGINNINGS = {
    # An older checkout, beside which `compare.py` runs this, has no such function.
    "prepared": "import pipedream_rt; getattr(pipedream_rt, 'prepare', lambda: None)()",
    "not prepared": "",
}


@click.command()
@click.option("--workers", default=4, show_default=True)
@click.option("--model", type=click.Choice(["linear", "gpt2"]), default="linear")
@click.option("--repeats", default=5, show_default=True)
@click.option("--how", type=click.Choice(list(BEGINNINGS)), multiple=True, help="Leave others out.")
@click.option("--run", "under_run", is_flag=True, help="Under `pipedream-rt run`.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines.")
def main(
    workers: int, model: str, repeats: int, how: tuple[str, ...], under_run: bool, as_json: bool
) -> None:
    """Open pipelines in programs, one after another."""
    command = [sys.executable]
    if under_run:
        command = [str(Path(sys.executable).with_name("pipedream-rt")), "run"]
        command += ["--nproc-per-node", str(workers)]
    for begins in how or BEGINNINGS:
        lines = []
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "script.py"
            of_model = "from transformers import GPT2Config, GPT2LMHeadModel"
            script.write_text(
                PROGRAM % (BEGINNINGS[begins], of_model if model == "gpt2" else "pass")
            )
            for _ in range(repeats):
                words = [*command, str(script), model, str(workers)]
                done = subprocess.run(words, check=True, capture_output=True, text=True)
                lines.append(json.loads(done.stdout))
        medians = {name: statistics.median(each[name] for each in lines) for name in lines[0]}
        found: dict[str, Any] = {"how": begins, **medians}
        figures = ", ".join(f"{name} {seconds:.2f}" for name, seconds in medians.items())
        print(json.dumps(found) if as_json else f"{begins}: {figures}")


if __name__ == "__main__":
    main()
