"""Distil a teacher of mathematics into a language model, on the model's own samples.

NeMo-RL's name of this script: `run_distillation.py` with the recipe `distillation_math` by default.
"""

import sys

from nemo_rl.command_line import run_command
from nemo_rl.launch.recipe_commands import DISTILLATION_JOB

if __name__ == "__main__":
    sys.exit(run_command(DISTILLATION_JOB.command(__doc__ or "", "distillation_math")))
