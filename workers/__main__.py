"""Runs ``python -m pipedream_rt.workers``, which is what ``pipedream-rt worker`` does."""

from __future__ import annotations

from pipedream_rt.workers.command import main

if __name__ == "__main__":
    main()
