"""Experiments between models: which arm a user is in, what is known of each arm, and when one is rolled back."""
