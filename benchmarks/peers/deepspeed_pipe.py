"""DeepSpeed's pipeline engine on the CPU: one process for each stage, messages by gloo.

DeepSpeed compiles an extension, for collective operations in shared memory, when it first runs on
a CPU, and keeps it. Here that happens before any process waits for another.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from processes import DEADLINE_S, Clock, Worker, main, measure, micro_batches, unavailable
from torch import Tensor
from workload import Workload, batches, loss_fn, optimizer_of, parts

BUILD = (
    "import deepspeed.pipe; from deepspeed.accelerator import get_accelerator; "
    "get_accelerator().create_op_builder('ShareMemCommBuilder').load()"
)


def build() -> None:
    """Compile DeepSpeed's extension, if that has not been done."""
    # The build calls ninja, which is beside the interpreter though its folder may not be in PATH.
    beside = str(Path(sys.executable).parent)
    os.environ.update(
        {
            "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}",
            "DS_ACCELERATOR": "cpu",
            "MAX_JOBS": "1",
        }
    )
    command = [sys.executable, "-c", BUILD]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE_S)
    except subprocess.CalledProcessError as error:
        unavailable(error.stderr.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        unavailable(
            f"its extension was not built within {DEADLINE_S:g} s; if a build was interrupted, "
            "remove deepspeed_shm_comm from the cache of torch extensions"
        )


def engine_of(w: Workload) -> Any:
    """Make the engine of this process' stage."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    # One layer is one part, so that its cut is ours.
    module = PipelineModule(
        parts(w), num_stages=w.stages, loss_fn=loss_fn, partition_method="uniform"
    )
    config = {
        "train_micro_batch_size_per_gpu": w.samples,
        "gradient_accumulation_steps": w.micro_batches,
        # Its default clips at a norm of 1.
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }
    optimizer = optimizer_of(w, [p for p in module.parameters() if p.requires_grad])
    return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]


def work(worker: Worker, w: Workload) -> tuple[Clock, float | None]:
    """Train one stage."""
    place = {"RANK": worker.rank, "LOCAL_RANK": worker.rank, "WORLD_SIZE": worker.count}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ["LOCAL_SIZE"] = str(worker.count)
    worker.join_group()
    import deepspeed

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, timeout=worker.timeout)
    engine, data, clock = engine_of(w), batches(w), Clock(worker.barrier)
    loss: Tensor | None = None
    for batch in clock.over(data):
        feed: Iterator[Any] = iter(micro_batches(w, batch))
        loss = engine.train_batch(feed)
    worker.leave_group()
    return clock, None if loss is None else loss.item()


def run(w: Workload) -> dict[str, float]:
    """Run one process for each stage."""
    build()
    return measure(work, w.stages, w)


if __name__ == "__main__":
    main(run)
