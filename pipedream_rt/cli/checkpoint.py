"""The command ``checkpoint``: inspects checkpoints. It starts no process."""

from __future__ import annotations

import os
from pathlib import Path

import click

from pipedream_rt.cli.shared_options import GivenPath
from pipedream_rt.errors import CheckpointError
from pipedream_rt.schema import printable
from pipedream_rt.tracing.summary import bytes_text, table

_SHOWN = 10_000
"""Characters of a value in a checkpoint that are shown."""


@click.group(short_help="Look at checkpoints, compare and export them.")
def checkpoint() -> None:
    """Look at checkpoints."""


@checkpoint.command()
@click.argument("folder", type=GivenPath(exists=True, file_okay=False, path_type=Path))
def verify(folder: Path) -> None:
    """Check every byte of a checkpoint, or of all checkpoints of a run."""
    # Imported here, because these import torch, which takes seconds.
    from pipedream_rt.checkpoint import checkpoints
    from pipedream_rt.checkpoint import verify as verified

    damaged = 0
    for each in checkpoints(folder) or [folder]:
        try:
            click.echo(f"{each}: whole, step {verified(each).step}")
        except CheckpointError as error:
            damaged += 1
            click.echo(f"{each}: damaged: {error}")
    if damaged:
        raise click.ClickException(f"{damaged} damaged")


@checkpoint.command()
@click.argument("folder", type=GivenPath(exists=True, file_okay=False, path_type=Path))
def inspect(folder: Path) -> None:
    """Show what a checkpoint says of itself; of a run, its newest whole one."""
    # Checkpoints import torch, which the other verbs start without.
    from pipedream_rt.checkpoint import newest_good
    from pipedream_rt.coordinator.checkpointing.pipeline_fingerprint import Fingerprint
    from pipedream_rt.stage.hyper import unpack_hyper

    found, manifest = newest_good(folder)
    click.echo(
        f"{found}: step {manifest.step}, {manifest.schedule}, "
        f"{manifest.workers * manifest.stages_per_worker} stages on {manifest.workers} workers, "
        f"{manifest.per_update} micro-batches per update"
    )
    mark = Fingerprint.of_plain(manifest.fingerprints)
    click.echo(
        f"fingerprint: {mark.digest} (weights {mark.weights[:8]}, buffers {mark.buffers[:8]}, "
        f"optimizer {mark.optimizer[:8]})"
    )
    for number, group in enumerate(manifest.groups):
        try:
            values = ", ".join(f"{name} {unpack_hyper(value)}" for name, value in group.items())
        except Exception as error:  # torch and NumPy raise anything for a malformed value
            raise CheckpointError(f"group {number} of {found} makes no sense: {error!r}") from error
        click.echo(f"parameter group {number}: {printable(values, _SHOWN)}")
    if manifest.place is not None:
        epoch, drawn = manifest.place["epoch"], manifest.place["drawn"]
        reached = "which begins" if drawn is None else f"{drawn} items drawn"
        click.echo(f"loader: epoch {epoch}, {reached}")
    if manifest.attached:
        click.echo(f"attached: {printable(', '.join(manifest.attached), _SHOWN)}")
    if manifest.extra is not None:
        click.echo(f"extra: {printable(str(manifest.extra), _SHOWN)}")
    rows = [("file", "size")]
    rows += [(name, bytes_text(size)) for name, (size, _) in sorted(manifest.files.items())]
    click.echo(table(rows))


@checkpoint.command()
@click.argument("first", type=GivenPath(exists=True, file_okay=False, path_type=Path))
@click.argument("second", type=GivenPath(exists=True, file_okay=False, path_type=Path))
def compare(first: Path, second: Path) -> None:
    """Find the first step at which the checkpoints of two runs differ; exit code 1 if one does.

    It compares fingerprints, of the steps at which both runs have a checkpoint. FIRST and SECOND
    are folders of runs, or of single checkpoints.
    """
    # Checkpoints import torch, which the other verbs start without.
    from pipedream_rt.checkpoint import checkpoints, read_manifest
    from pipedream_rt.coordinator.checkpointing.pipeline_fingerprint import Fingerprint

    runs = [
        {manifest.step: Fingerprint.of_plain(manifest.fingerprints) for manifest in manifests}
        for manifests in (
            [read_manifest(each) for each in checkpoints(folder) or [folder]]
            for folder in (first, second)
        )
    ]
    common = sorted(runs[0].keys() & runs[1].keys())
    if not common:
        steps = [", ".join(map(str, sorted(run))) for run in runs]
        raise CheckpointError(f"no step has a checkpoint in both: {steps[0]}; {steps[1]}")
    for step in common:
        if difference := runs[0][step].first_difference(runs[1][step]):
            before = [earlier for earlier in common if earlier < step]
            same = f"equal up to step {before[-1]}, " if before else ""
            raise click.ClickException(f"{same}different at step {step}: {difference}")
    click.echo(f"equal at the steps {', '.join(map(str, common))}")


@checkpoint.command()
@click.argument("folder", type=GivenPath(exists=True, file_okay=False, path_type=Path))
@click.argument("output", type=GivenPath(dir_okay=False, writable=True, path_type=Path))
@click.option("--force", is_flag=True, help="Replace OUTPUT if it is there.")
def export(folder: Path, output: Path, force: bool) -> None:
    """Write the weights of a checkpoint as one safetensors file; of a run, its newest whole one.

    Its keys are the model's own: load it with safetensors.torch.load_file and load_state_dict.
    """
    # Checkpoints import torch, which the other verbs start without.
    from pipedream_rt.checkpoint import newest_good, weights_of
    from pipedream_rt.checkpoint.layout import MANIFEST, is_name
    from pipedream_rt.checkpoint.writing import write_tensors

    found, manifest = newest_good(folder)
    target = output.absolute().parent.resolve() / output.name
    if any(is_name(each.name) or (each / MANIFEST).exists() for each in (target, *target.parents)):
        raise CheckpointError(
            f"{output} is inside a checkpoint, which nobody changes; name another"
        )
    if os.path.lexists(output) and not force:
        raise CheckpointError(f"{output} is there already; --force replaces it")
    weights = weights_of(found, manifest.files)
    write_tensors(output, weights)
    click.echo(f"{output}: {len(weights)} tensors of step {manifest.step}")
