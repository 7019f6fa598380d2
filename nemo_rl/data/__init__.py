"""Data sets as prompts, and conversations as tokens."""
