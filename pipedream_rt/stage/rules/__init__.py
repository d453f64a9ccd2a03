"""Rules: what each feature does to the updates of a stage. A feature is one file here."""
