"""NeMo Gym over HTTP alone: its stack, its agents, their replies. Nothing of Gym is imported."""
