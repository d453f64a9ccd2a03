"""A pipeline in words and a table: the split, the weight versions and the memory of each stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

from pipedream_rt import extras
from pipedream_rt.schedules import Plan
from pipedream_rt.stage.correction import Correction
from pipedream_rt.tracing.summary import WIDTH, bytes_text, table
from pipedream_rt.transport.shared import SMALLEST


class Explanation(str):
    """The text of `explain`; a notebook shows it as a table between paragraphs.

    Attributes:
        before: The lines above the table.
        rows: The table, with its head.
        after: The lines below it.
        program: The steps of the recorded forward; empty where nobody has asked.
    """

    before: Sequence[str]
    rows: Sequence[tuple[str, ...]]
    after: Sequence[str]
    program: str

    @classmethod
    def of(
        cls,
        before: Sequence[str],
        rows: Sequence[tuple[str, ...]],
        after: Sequence[str],
        program: str,
    ) -> Explanation:
        """Return the text of these parts, in the width of a terminal."""
        parts = [*_filled(before), table(rows, WIDTH), *_filled(after), program]
        made = cls("\n".join(filter(None, parts)))
        made.before, made.rows, made.after, made.program = before, rows, after, program
        return made

    def _repr_html_(self) -> str:
        return str(extras.explanation_html(self.before, self.rows, self.after, self.program))


_NO_CODECS: Mapping[tuple[int, int], str] = {}


def explain(
    plan: Plan,
    workers: Sequence[str],
    statistics: Sequence[Mapping[str, Any]],
    how: str,
    corrections: Sequence[Correction] = (),
    codecs: Mapping[tuple[int, int], str] = _NO_CODECS,
    *,
    verified: str = "",
    places: Sequence[str] = (),
    program: str = "",
) -> Explanation:
    """Return lines about the pipeline, and a table with a row for each stage, or replica."""
    on_devices = any("device_memory_bytes" in counters for counters in statistics)
    rows: list[tuple[str, ...]] = [
        (
            *("stage", "worker", "layers", "parameters", "in flight", "staleness"),
            *("versions", "weights MiB"),
            *(["corrections MiB"] if corrections else []),
            "peak MiB",
            *(["device", "device MiB", "device peak MiB"] if on_devices else []),
        )
    ]
    for address, counters in zip(plan.addresses, statistics, strict=True):
        stage = plan.stage_of(address)
        layers = plan.layers[stage]
        rows.append(
            (
                plan.label_of(address),
                workers[plan.worker_of(address)],
                layers[0] if len(layers) == 1 else f"{layers[0]}..{layers[-1]}",
                f"{counters['parameters']:,}",
                f"<= {plan.in_flight(stage)}",
                f"<= {plan.staleness(stage)}",
                f"{counters['versions_kept']} of {plan.kept(stage)}",
                _of_most(counters["versions_kept"], plan.kept(stage), counters["weight_bytes"]),
                *([_memory(plan, stage, corrections, counters)] if corrections else []),
                f"{counters['peak_memory_bytes'] / 2**20:.0f}",
                *(_on_device(counters) if on_devices else []),
            )
        )
    slack = f", slack {', '.join(map(str, plan.shape.slack))}" if plan.shape.slack else ""
    head = f"schedule {plan.title}, {plan.per_update} micro-batches per update{slack}"
    lines = [head, how]
    if corrections:
        lines.append(f"corrections: {', '.join(map(repr, corrections))}")
        if passes := sum(each.passes for each in corrections):
            lines.append(
                f"  in each update they take the time of {passes:.0f} passes over a stage's "
                "weights in memory; AdamW takes that of about 30"
            )
    lines += [
        f"{tie.name} is used on the stages {', '.join(map(str, tie.stages))}; the first owns it"
        for tie in plan.ties
    ]
    lines += _of_codecs(codecs, statistics)
    lines += _of_script(plan, statistics)
    lines += _of_memory(workers, places)
    lines = [line for text in lines for line in text.splitlines()]
    return Explanation.of(lines, rows, [verified] if verified else [], program)


def _filled(texts: Sequence[str]) -> list[str]:
    """Wrap texts to the width of a terminal."""
    return [fill(line, WIDTH, subsequent_indent="  ") for line in texts]


def _of_memory(workers: Sequence[str], places: Sequence[str]) -> list[str]:
    """Say which workers pass large values in shared memory: those of equal places."""
    by_place: dict[str, dict[str, None]] = {}
    for name, place in zip(workers, places, strict=False):
        by_place.setdefault(place or name, {})[name] = None
    together = [names for names in map(list, by_place.values()) if len(names) > 1]
    if not together:
        return []
    text = f"values of {SMALLEST >> 10} KiB and more go from worker to worker in memory that both "
    if len(by_place) == 1:
        return [f"{text}share, smaller ones over sockets"]
    among = " and among ".join(_listed(names, list(dict.fromkeys(workers))) for names in together)
    return [f"{text}share, among {among}; smaller ones, and those to other workers, over sockets"]


def _listed(names: list[str], workers: list[str]) -> str:
    """Join names; more than four neighbours among the workers become 'first to last'."""
    first = workers.index(names[0])
    if len(names) > 4 and workers[first : first + len(names)] == names:
        return f"{names[0]} to {names[-1]}"
    return ", ".join(names)


def _of_codecs(
    codecs: Mapping[tuple[int, int], str], statistics: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Name the codecs of each edge, and the bytes of a micro-batch without and with them."""
    found = []
    for edge, text in codecs.items():
        # Both directions begin with it: a gradient of an encoded value has the size of that.
        encoded = _mean(statistics, "encoded", edge, "forward")
        found.append(f"edge {edge[0]} -> {edge[1]}: {text}")
        for what, direction in (("values", "forward"), ("gradients", "backward")):
            packed = _mean(statistics, "packed", edge, direction)
            if steps := [each for each in (encoded, packed) if each is not None]:
                before, after = bytes_text(steps[0][0]), bytes_text(steps[-1][1])
                found.append(f"  {after} of {what} in the place of {before}, for a micro-batch")
    return found


def _of_script(plan: Plan, statistics: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say how many bytes cross to a script that computes the loss, and if that is much."""
    if not plan.loss_in_script:
        return []
    sizes = dict(zip(plan.addresses, (c["output_bytes"] for c in statistics), strict=True))
    ends = plan.addresses_of(plan.exits[0])
    output = max(sizes[end] for end in ends)
    between = max((size for address, size in sizes.items() if address not in ends), default=0)
    if not output:
        return ["the script computes the loss: outputs come to it, and gradients go back"]
    text = bytes_text(output)
    lines = [
        f"the script computes the loss: {text} of outputs come to it for a micro-batch, and as "
        "much of gradients goes back"
    ]
    if output > between > 0:
        lines.append(
            f"that is more than the {bytes_text(between)} of activations between two stages; with "
            "loss_fn, the last stage computes the loss and sends a number"
        )
    return lines


def _mean(
    statistics: Sequence[Mapping[str, Any]], done: str, edge: tuple[int, int], direction: str
) -> tuple[float, float] | None:
    """Return the mean bytes of a micro-batch on an edge, before and after; None if none crossed."""
    rows = [row for counters in statistics for row in counters.get(done, ())]
    mine = [row[3:] for row in rows if tuple(row[:2]) == edge and row[2] == direction]
    count, before, after = (
        (sum(numbers) for numbers in zip(*mine, strict=True)) if mine else (0, 0, 0)
    )
    return (before / count, after / count) if count else None


def _on_device(counters: Mapping[str, Any]) -> list[str]:
    """Return the device of a stage, and the MiB that its process holds there now and at most."""
    sizes = (counters.get(key) for key in ("device_memory_bytes", "peak_device_memory_bytes"))
    return [counters["device"], *("" if n is None else f"{n / 2**20:.1f}" for n in sizes)]


def _of_most(count: int, most: int, size: int) -> str:
    """Return the MiB of ``count`` versions of ``size`` bytes, and of ``most`` of them."""
    return f"{count * size / 2**20:.1f} of {most * size / 2**20:.1f}"


def _memory(
    plan: Plan, stage: int, corrections: Sequence[Correction], counters: Mapping[str, Any]
) -> str:
    """Return the MiB that corrections take now, and those that they will take."""
    kept = plan.kept(stage) if plan.staleness(stage) else 0
    copies = sum(each.copies + kept * each.copies_per_version for each in corrections)
    most = copies * counters["weight_bytes"] / 2**20
    return f"{counters['correction_bytes'] / 2**20:.1f} of {most:.1f}"
