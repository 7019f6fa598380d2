"""Environments: who scores answers and goes on with conversations."""
