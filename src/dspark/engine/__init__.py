"""Generation: one request with speculation, or many requests at once without."""
