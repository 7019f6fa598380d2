"""Scorers of whole rollouts: rules, reward models in this run or served, and judges."""
