"""The way of the policy's weights to the engines, and the check that they arrived."""
