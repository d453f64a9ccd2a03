"""Whether machines fit a job: what each finds of itself, and what the links between them carry."""
