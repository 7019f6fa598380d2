"""Losses: scalars of what the current weights say about a batch."""
