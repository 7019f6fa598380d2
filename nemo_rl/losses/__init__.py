"""Losses: one file a type, with its section, check, factory and computation."""
