"""The worker process: command, start-up, signals and end. Installed as pipedream_rt.workers."""
