"""A pipeline with one micro-batch and no corrections, unless a test says otherwise.

By default a pipeline takes as many micro-batches as make no gradient more than one update stale,
and the corrections that were measured to help. A test that compares bits with the oracle says
itself what it compares, and counts updates and micro-batches as the test of a schedule does, so it
begins with neither. What a pipeline does by default is tested in
``tests/properties/test_defaults.py``.

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
        super().__init__(*args, **grouped(options))


class Pipeline(Flat):
    def __init__(self, *args, **options):
        super().__init__(*args, **{"micro_batches": 1, "corrections": (), **options})
