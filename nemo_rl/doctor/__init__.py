"""`nemo-rl doctor`: measurements of a machine and of a recipe's files, and its findings."""
