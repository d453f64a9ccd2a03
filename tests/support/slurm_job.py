"""A job of the Slurm of slurm.py that trains, from the batch file that users get."""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from .deadlines import LATEST_S
from .nodes import SCRIPT, command_in
from .slurm import until

SBATCH = Path(__file__).parents[2] / "workers" / "slurm.sbatch"
STEPS = 600


class Job:
    """A job that trains on three nodes, from the sbatch file that users get."""

    def __init__(self, slurm, folder, steps=STEPS):
        folder.mkdir()
        self.slurm, self.output = slurm, folder / "out"
        commands = os.path.dirname(sys.executable)
        command_in(folder / "bin")
        answer = slurm.run(
            "sbatch", "--parsable", "--nodes=3", f"--output={self.output}", f"--chdir={folder}",
            SBATCH, SCRIPT, folder / "run", "--steps", steps,
            PATH=f"{folder / 'bin'}:{commands}:{os.environ['PATH']}", PYTHONUNBUFFERED="1",
            PYTHONPATH=str(SBATCH.parents[1]), PIPEDREAM_RT_JOB_FOLDER=str(folder / "shared"),
        )  # fmt: skip
        self.number = int(answer.split()[-1])
        self.shared = folder / "shared"

    @property
    def text(self):
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def wait_for(self, words, after=0):
        """Wait for words beyond a place of the output, and return the place behind them."""

        def found():
            return words in self.text[after:]

        until(found, lambda: self.slurm.tell(f"no {words!r} in {self.text}"), LATEST_S)
        return self.text.index(words, after) + len(words)

    def kill_run(self, node):
        """Kill `pipedream-rt run` on a node, and not the loop around it."""
        killed = 0
        for pid in self.slurm.node_processes(node):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if words[2:3] == [b"run"] and words[1].endswith(b"bin/pipedream-rt"):
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
        assert killed == 1
