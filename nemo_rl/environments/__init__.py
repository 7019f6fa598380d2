"""Environments: they score answers and continue conversations."""
