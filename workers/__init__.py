"""The worker process: its command, start-up, signals and end. Imported as pipedream_rt.workers."""
