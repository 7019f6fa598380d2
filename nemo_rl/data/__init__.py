"""Datasets as prompts, and conversations as tokens."""
