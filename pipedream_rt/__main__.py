"""``python -m pipedream_rt``, the same as ``pipedream-rt``."""

from __future__ import annotations

from pipedream_rt.cli import main

if __name__ == "__main__":
    main()
