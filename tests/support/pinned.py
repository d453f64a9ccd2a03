"""Pipelines of tests, which say themselves what they compare: what they leave out is not chosen.

By default a pipeline chooses its schedule, its micro-batches and its corrections, and verifies its
first mini-batch. A `Flat` has a schedule with staleness and verifies nothing; a `Pipeline` has one
micro-batch and no corrections too, since a test that compares bits with the oracle counts updates
and micro-batches as the table of schedules does. What is chosen by default is tested with
``schedule=None``, and in `tests/verify`.

Options of a group may be given by their own names, since a table of options that a test goes
through has them side by side.
"""

import dataclasses

import pipedream_rt
from pipedream_rt import Layout, Observe, Recovery, Training

GROUPS = {"training": Training, "layout": Layout, "recovery": Recovery, "observe": Observe}
HOMES = {each.name: name for name, group in GROUPS.items() for each in dataclasses.fields(group)}


def grouped(options):
    """Return options of which those of a group are in it."""
    flat = {name: value for name, value in options.items() if name not in HOMES}
    for name, group in GROUPS.items():
        own = {each: value for each, value in options.items() if HOMES.get(each) == name}
        if own:
            base = Training(verify=False) if group is Training else group()
            flat[name] = dataclasses.replace(flat.get(name, base), **own)
    return flat


class Flat(pipedream_rt.Pipeline):
    """A pipeline that takes all options side by side."""

    def __init__(self, *args, **options):
        left_out = {"schedule": "async-1f1b", "training": Training(verify=False)}
        super().__init__(*args, **{**left_out, **grouped(options)})


class Pipeline(Flat):
    def __init__(self, *args, **options):
        super().__init__(*args, **{"micro_batches": 1, "corrections": (), **options})
