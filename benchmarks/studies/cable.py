"""How long after a cable is in again a run goes on, with workers that were started by hand.

Two network namespaces are two machines (root). Two workers with ``--persist`` stand on each, the
script on the first; the heartbeat is 3 s. The cable is out for some seconds, while busy processes
load the machine. Told is the time from the moment when the cable is in again to the end of the
recovery, and to the next loss; a run without a cut must have the same digest.

    python benchmarks/studies/cable.py --cut 8 --load 2 --repeats 3
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.two_hosts import A, two_hosts, why_not  # noqa: E402

SCRIPT = str(ROOT / "tests" / "support" / "across.py")
ADDRESS = f"{A}:29500"


def once(cut_s: float) -> dict[str, float | str]:
    """Cut the cable once, and return what came of it."""
    with two_hosts() as hosts:
        for name in ("a1", "a2", "b1", "b2"):
            hosts.worker(name[0], name, ADDRESS, "--persist")
        run = hosts.start(
            "a", SCRIPT, "--workers", ADDRESS, "--heartbeat", "3", "--pause-at", "5", "25"
        )
        run.wait_for("paused after 5")
        hosts.cut()
        began = time.monotonic()
        run.go_on()
        threading.Event().wait(cut_s)
        hosts.heal()
        healed = time.monotonic()
        run.wait_for("recovered in")
        recovered = time.monotonic()
        run.wait_for("paused after 25")
        trained = time.monotonic()
        run.go_on()
        digest = run.wait_for("digest")
        run.ended()
        return {
            "cut_s": healed - began,
            "recovered_s": recovered - healed,
            "trained_s": trained - healed,
            "digest": digest.split()[-1],
        }


@click.command()
@click.option("--cut", "cut_s", default=8.0, show_default=True, help="Seconds without a cable.")
@click.option("--load", default=2, show_default=True, help="Busy processes beside.")
@click.option("--repeats", default=3, show_default=True)
def main(cut_s: float, load: int, repeats: int) -> None:
    """Print a JSON line for each cut, and the medians."""
    if reason := why_not():
        raise click.ClickException(reason)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(load)]
    try:
        found = []
        for _ in range(repeats):
            found.append(once(cut_s))
            click.echo(json.dumps(found[-1]))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    undisturbed = subprocess.run(
        [sys.executable, SCRIPT, "--workers", "serial"], capture_output=True, text=True, check=True
    ).stdout.split()[-1]
    same = all(each["digest"] == undisturbed for each in found)
    medians = {
        name: statistics.median(float(each[name]) for each in found)
        for name in ("recovered_s", "trained_s")
    }
    click.echo(json.dumps({"medians": medians, "same_bits": same}))


if __name__ == "__main__":
    main()
