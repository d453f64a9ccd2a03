"""The coordinator: what the process of the user's script does for a pipeline, one class per job."""
