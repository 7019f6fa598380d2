"""`nemo-rl doctor`: what it measures of a machine and of a recipe's files, and its findings."""
