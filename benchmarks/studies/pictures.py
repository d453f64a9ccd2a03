"""Pictures for the docs, of the report and the live page of a run in which a worker is killed.

A headless Chromium takes them (Debian's package chromium).

    python benchmarks/studies/pictures.py
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from pipedream_rt import Checkpoints, Observe, Pipeline, Recovery
from pipedream_rt.cli.show import workers_now
from pipedream_rt.coordinator.recovery.status_server import running
from pipedream_rt.observers.folder import Following
from pipedream_rt.observers.live import LivePage

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars",
)  # fmt: skip


def picture(address: str, path: Path, width: int, height: int) -> None:
    """Take a picture of a page.

    Args:
        address: Where the page is.
        path: The file for the picture.
        width: The width of the window, in pixels.
        height: The height of the window.
    """
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("there is no Chromium here: apt-get install chromium")
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [browser, *OPTIONS, f"--user-data-dir={profile}", f"--window-size={width},{height}",
             f"--screenshot={path}", address],
            check=True, timeout=120, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    print(path)


def kill_a_worker() -> None:
    """Kill the second worker of the pipeline of this process."""
    for _, status in running():
        if status["pid"] == os.getpid():
            process = status["workers"][1]["process"]
            os.kill(int("".join(c for c in process if c.isdigit())), signal.SIGKILL)


def main() -> None:
    """Run, and take the pictures."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(6)]
    model = nn.Sequential(*layers, nn.Linear(256, 4))
    x = torch.randn(6400, 256)
    y = x[:, :4].argmax(1)
    loader = list(zip(x.split(64), y.split(64), strict=True))
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        with Pipeline(
            model,
            stages=3,
            loss_fn=F.cross_entropy,
            optimizer=(torch.optim.AdamW, {"lr": 1e-3}),
            checkpoint=Checkpoints(Path(folder) / "saved", every=100),
            recovery=Recovery(max_restarts=1),
            observe=Observe(record=run),
        ) as pipe:
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(pipe.optimizer, T_max=400)
            for epoch in range(4):
                for _ in pipe.train_epoch(loader):
                    schedule.step()
                pipe.evaluate(loader[:10])
                if epoch == 1:
                    kill_a_worker()
                if epoch == 2:
                    with closing(LivePage(Following(run), workers=workers_now)) as page:
                        picture(page.address, IMAGES / "live.png", 1000, 1100)
        report = Path(folder) / "report.html"
        command = [sys.executable, "-c", "from pipedream_rt.cli import main; main()"]
        subprocess.run([*command, "report", str(run), "-o", str(report)], check=True)
        picture(report.as_uri(), IMAGES / "report.png", 1000, 2300)


if __name__ == "__main__":
    main()
