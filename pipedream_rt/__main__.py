"""Runs ``python -m pipedream_rt``, which is what ``pipedream-rt`` does."""

from __future__ import annotations

from pipedream_rt.cli import main

if __name__ == "__main__":
    main()
