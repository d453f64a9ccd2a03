"""Whether machines fit a job: findings of each about itself, and the speed of their links."""
