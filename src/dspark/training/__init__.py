"""Training a drafter: data from the target, its hidden states, the objective, the loop."""
