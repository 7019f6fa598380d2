"""Train a language model with GRPO.

uv run examples/run_grpo.py                                        the quickstart: two CPU cores, five minutes
uv run examples/run_grpo.py --config grpo_math_1B.yaml
uv run examples/run_grpo.py grpo.num_prompts_per_step=4 ++policy.optimizer.kwargs.lr=1e-4
uv run examples/run_grpo.py --dry-run                              resolve and validate the configuration only
"""

import sys

from nemo_rl.command_line import run_command
from nemo_rl.launch.recipe_commands import GRPO_JOB

HINT = "NeMo-RL's default is --config grpo_math_1B"

if __name__ == "__main__":
    sys.exit(run_command(GRPO_JOB.command(__doc__ or "", "quickstart", hint=HINT)))
