"""What the tests share: the oracle, models, and the hunt for leaks."""
