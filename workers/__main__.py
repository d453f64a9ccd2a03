"""``python -m pipedream_rt.workers``: what ``pipedream-rt worker`` runs."""

from __future__ import annotations

from pipedream_rt.workers.command import main

if __name__ == "__main__":
    main()
