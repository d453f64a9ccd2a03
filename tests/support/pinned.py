"""A pipeline with one micro-batch and no corrections, unless a test says otherwise.

By default a pipeline takes as many micro-batches as make no gradient more than one update stale,
and the corrections that were measured to help. A test that compares bits with the oracle says
itself what it compares, and counts updates and micro-batches as the test of a schedule does, so it
begins with neither. What a pipeline does by default is tested in ``tests/test_defaults.py``.
"""

import functools

import pipedream_rt

Pipeline = functools.partial(pipedream_rt.Pipeline, micro_batches=1, corrections=())
