"""The worker process: its command, start-up, signals and end. Its name is pipedream_rt.workers."""
