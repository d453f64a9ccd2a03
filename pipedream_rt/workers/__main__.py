"""``python -m pipedream_rt.workers``, the same as ``pipedream-rt worker``."""

from __future__ import annotations

from pipedream_rt.cluster.worker.command import main

if __name__ == "__main__":
    main()
