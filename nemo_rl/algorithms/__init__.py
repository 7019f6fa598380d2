"""Training of a policy from groups of trajectories: rewards, advantages, losses, and the loop that runs them."""
