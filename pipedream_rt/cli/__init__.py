"""The command ``pipedream-rt``."""

from pipedream_rt.cli.main import main

__all__ = ["main"]
