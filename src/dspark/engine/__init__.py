"""Generation: one request round by round, or many at once with verification scheduled by load."""
