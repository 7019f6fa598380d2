"""From groups of trajectories to a trained policy: rewards, advantages, losses, and the loop that runs them."""
