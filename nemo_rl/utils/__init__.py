"""NeMo-RL's import path of configuration and logging, for run scripts."""
