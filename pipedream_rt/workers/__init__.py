"""The program of a worker process: ``python -m pipedream_rt.workers``."""
