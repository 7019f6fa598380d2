"""The way from prompts to training batches: rollouts, the sources of their groups, and their assembly into tensors."""
