"""Training a drafter and its head against a frozen target."""
