"""Making confidences probabilities: sequential temperature scaling, and how true they are."""
