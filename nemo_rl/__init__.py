"""Reinforcement learning and on-policy distillation for language models."""

import os

# Under `uv run` Ray would build the environment again for every worker; workers share this one.
# It must be set before anything imports Ray.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
