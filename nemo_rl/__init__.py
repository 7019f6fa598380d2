"""Reinforcement learning and on-policy distillation for language models."""

import os
import sys

from nemo_rl.nemo_rl_names import ReplacedModules

# Under `uv run` Ray would build the environment again for every worker; workers share this one.
# It must be set before anything imports Ray.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

# Asked last, so for modules that do not exist: those of NeMo-RL are refused with what replaces them.
if not any(isinstance(finder, ReplacedModules) for finder in sys.meta_path):
    sys.meta_path.append(ReplacedModules())
