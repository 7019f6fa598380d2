"""Collections of rollouts: their store, and what is made of it: merges and profiles."""
