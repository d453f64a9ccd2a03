"""Rules: what each feature does to the training of a stage. A feature is one file here."""
