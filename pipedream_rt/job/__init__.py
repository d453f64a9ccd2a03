"""What is known before anything runs: options, split, plan, and what the workers get."""
