"""Losses: the section, check, factory and computation of each."""
