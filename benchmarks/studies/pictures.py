"""The pictures of the docs: `make images` makes all of them that this machine can make.

The run in README is trained here, once with a worker that is killed and once in peace; without the
same weights there is no picture. Other pictures need what their line says when it is absent, and
are left as they are then.

    python benchmarks/studies/pictures.py [readme | timeline | curves | pages]
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from pipedream_rt import Checkpoints, Observe, Pipeline, Recovery, Trace
from pipedream_rt.cli.show import workers_now
from pipedream_rt.coordinator.recovery.status_server import running
from pipedream_rt.observers.folder import Following, read_run
from pipedream_rt.observers.live import LivePage
from pipedream_rt.observers.page.curves import curve_panels
from pipedream_rt.observers.run_record import RunRecord
from pipedream_rt.schedules import Kind
from pipedream_rt.tracing.summary import seconds_text
from pipedream_rt.tracing.timeline import svg, window
from pipedream_rt.tracing.trace import CODES

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
STYLE = ROOT / "pipedream_rt" / "observers" / "page" / "style.css"
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars",
)  # fmt: skip
EPOCHS, BATCHES, KILLED = 4, 100, 230
DRAWN = 250
"""The update with which the strip of the trace begins, after the new workers have begun."""

STRIP_NS = 130_000_000
"""The part of the trace that is drawn, in nanoseconds."""


def picture(address: str, path: Path, width: int, height: int) -> None:
    """Take a picture of a page.

    Args:
        address: Where the page is.
        path: The file for the picture.
        width: The width of the window, in pixels.
        height: The height of the window.
    """
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [browser() or "", *OPTIONS, f"--user-data-dir={profile}",
             f"--window-size={width},{height}", f"--screenshot={path}", address],
            check=True, timeout=120, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    print(path)


def browser() -> str | None:
    """Return the path of a headless browser."""
    return shutil.which("chromium") or shutil.which("google-chrome")


def kill_a_worker() -> None:
    """Kill the second worker of the pipeline of this process."""
    for _, status in running():
        if status["pid"] == os.getpid():
            process = status["workers"][1]["process"]
            os.kill(int("".join(c for c in process if c.isdigit())), signal.SIGKILL)


def train(folder: Path, killed: int | None, live: bool = False) -> tuple[str, Trace]:
    """Train, and return the digest of all weights and the trace of the last generation.

    Args:
        folder: For checkpoints, and for the record of the run in ``run``.
        killed: The mini-batch at which a worker is killed; None for none.
        live: Whether to take a picture of the live page.
    """
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(6)]
    model = nn.Sequential(nn.Linear(256, 512), *layers, nn.Linear(512, 4))
    x = torch.randn(BATCHES * 192, 256)
    y = x[:, :4].argmax(1)
    loader = list(zip(x.split(192), y.split(192), strict=True))
    with Pipeline(
        model,
        stages=3,
        loss_fn=F.cross_entropy,
        optimizer=(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        schedule="async-1f1b",
        checkpoint=Checkpoints(folder / "saved", every=BATCHES),
        recovery=Recovery(max_restarts=1),
        observe=Observe(record=folder / "run", trace=True),
    ) as pipe:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
            pipe.optimizer, T_max=EPOCHS * BATCHES
        )
        for epoch in range(EPOCHS):
            for result in pipe.train_epoch(loader):
                schedule.step()
                if result.step == killed:
                    kill_a_worker()
            pipe.evaluate(loader[:10])
            if live and epoch == 2:
                with closing(LivePage(Following(folder / "run"), workers=workers_now)) as page:
                    picture(page.address, IMAGES / "live.png", 1000, 1100)
        return pipe.fingerprint().digest, pipe.trace()


def composed(record: RunRecord, trace: Trace, dark: bool, narrow: bool) -> str:
    """Return the picture of README: loss and throughput, and a strip of what workers did.

    Args:
        record: What the run has told.
        trace: Its last generation.
        dark: For readers who prefer a dark scheme.
        narrow: For a small screen: the charts below each other, and no strip.
    """
    assert record.begun is not None
    charts = {panel.name: str(panel.body) for panel in curve_panels(record, record.begun, False)}
    sheet = STYLE.read_text()
    colours = re.findall(r":root \{(.*?)\}", sheet, re.DOTALL)
    rules = re.findall(r"^\.(?:chart|grid|line|l0|mark)\b.*$", sheet, re.MULTILINE)
    first = next(
        box.start
        for box in window(trace, 0.0, 1e6).boxes
        if (box.kind, box.index) == (CODES[Kind.STEP], DRAWN)
    )
    strip = svg(trace, window(trace, first / 1e9, (first + STRIP_NS) / 1e9), 980)
    [recovered] = record.recovered
    after = seconds_text(recovered.seconds)
    title = [
        f"A worker is killed (\u25bc): after {after} the run goes on, and",
        "the weights at the end are those of a run in peace, bit for bit.",
    ]
    if narrow:
        width, height, places, strip = 500, 560, ((0, 66), (0, 312)), ""
    else:
        title, places = [" ".join(title)], ((0, 46), (500, 46))
        width, height = 1000, 275 + int(re.findall(r'height="(\d+)"', strip)[0])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f"<style>:root {{{''.join(colours[: 1 + dark])}}}",
        *rules,
        # One line in each chart, and no legend: what is smoothed or evaluated is left out.
        ".l1, .l2, .mark.evaluated { display: none; }",
        "text { fill: var(--ink); } .strip text { fill: var(--dim); }",
        ".strip text[pointer-events] { fill: var(--on); }",
        '.strip rect[fill="white"] { fill: none; }',
        '.strip rect[fill="#f1f3f4"] { fill: var(--grid); }',
        "</style>",
        f'<rect width="{width}" height="{height}" fill="var(--paper)"/>',
        *(
            f'<text x="10" y="{22 + 20 * i}" font-size="14">{line}</text>'
            for i, line in enumerate(title)
        ),
    ]
    names = (("loss", "loss"), ("throughput", "samples per second"))
    for (name, words), (left, top) in zip(names, places, strict=True):
        drawn = re.findall(r"<svg .*?</svg>", charts[name], re.DOTALL)[0]
        parts += [
            drawn.replace("<svg ", f'<svg x="{left}" y="{top}" width="490" height="236" ', 1),
            f'<text x="{left + 10}" y="{top}" font-size="12">{words}</text>',
        ]
    parts += [f'<svg class="strip" x="10" y="270">{strip}</svg>', "</svg>"]
    return "\n".join(parts) + "\n"


def readme() -> None:
    """The picture of README, light and dark, wide and narrow."""
    with tempfile.TemporaryDirectory() as calm, tempfile.TemporaryDirectory() as disturbed:
        expected, _ = train(Path(calm), None)
        found, trace = train(Path(disturbed), KILLED)
        if found != expected:
            sys.exit("the weights of the run whose worker was killed are not those of the other")
        record = read_run(Path(disturbed) / "run")
        for name in ("light", "dark", "light-narrow", "dark-narrow"):
            path = IMAGES / f"run-{name}.svg"
            path.write_text(composed(record, trace, "dark" in name, "narrow" in name))
            print(path)


def timeline() -> None:
    """The drawing of the page on timelines, by the commands that the page has."""
    page = (ROOT / "docs" / "guide" / "timeline.md").read_text()
    for line in page.splitlines():
        if line.startswith("pipedream-rt ") and "zb.trace" in line:
            command = [sys.executable, "-m", "pipedream_rt", *line.split()[1:]]
            subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    (ROOT / "zb.trace").unlink()
    print(IMAGES / "zero_bubble.svg")


def curves() -> None:
    """The curves of what benchmarks have kept; nothing is measured."""
    if find_spec("matplotlib") is None:
        names = "peers.svg, learning.svg, trend.svg and time-to-loss.svg"
        print(f"{names} stay: they need matplotlib (the extra viz)")
        return
    learning = ["benchmarks/learning.py", "plot"]
    for name, words in (
        ("peers.svg", ["-m", "benchmarks", "peers", "--show", "--plot"]),
        ("learning.svg", [*learning, "figure", "-o"]),
        ("trend.svg", [*learning, "trend", "--over", "stages", "-o"]),
        ("time-to-loss.svg", ["benchmarks/first_touch.py", "plot", "-o"]),
    ):
        command = [sys.executable, *words, str(IMAGES / name)]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        print(IMAGES / name)


def pages() -> None:
    """Photographs of a report and of a live page."""
    if browser() is None:
        print("report.png and live.png stay: they need Chromium (apt-get install chromium)")
        return
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder), KILLED, live=True)
        report = Path(folder) / "report.html"
        run = ["report", str(Path(folder) / "run"), "-o", str(report)]
        subprocess.run([sys.executable, "-m", "pipedream_rt", *run], check=True)
        picture(report.as_uri(), IMAGES / "report.png", 1000, 2300)


MAKERS = {each.__name__: each for each in (readme, timeline, curves, pages)}

if __name__ == "__main__":
    for each in sys.argv[1:] or MAKERS:
        MAKERS[each]()
