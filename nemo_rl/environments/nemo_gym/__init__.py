"""NeMo Gym over HTTP only: its stack, its agents, their replies. Nothing of Gym is imported."""
