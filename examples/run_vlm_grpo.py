"""Train a vision-language model with GRPO.

NeMo-RL's name of this script: `run_grpo.py` with the recipe `vision` by default.
"""

import sys

from nemo_rl.command_line import run_command
from nemo_rl.launch.recipe_commands import GRPO_JOB

if __name__ == "__main__":
    sys.exit(run_command(GRPO_JOB.command(__doc__ or "", "vision")))
