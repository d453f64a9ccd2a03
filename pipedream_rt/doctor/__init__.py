"""Whether machines fit a job: what each finds about itself, and what their links carry."""
