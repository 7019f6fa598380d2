"""How the policy's weights reach the engine, and the check that they did."""
