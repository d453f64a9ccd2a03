"""The examples as scripts, in the process of a test: they need not import everything again."""

import runpy
import sys
from pathlib import Path

import pytest

from pipedream_rt.cluster import forked_workers

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_example(name, options):
    """Run an example as ``python`` does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        patch.setattr(sys, "argv", [name, *map(str, options)])
        # What it imports may start a thread, behind which the fork server imports nothing any more,
        # and each worker of later tests everything by itself.
        patch.setattr(forked_workers, "imports_of", lambda program: [])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        assert not ended.value.code
