"""Target models: one decoder over several families, its key/value memory, and how checkpoints are found and read."""
