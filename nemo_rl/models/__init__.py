"""NeMo-RL's import path of its models, for run scripts."""
