"""What the process of the user's script does for a pipeline: small objects with one job each."""
