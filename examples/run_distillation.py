"""Distil a teacher into a language model, on the model's own samples.

uv run examples/run_distillation.py                                the quickstart: two CPU cores, five minutes
uv run examples/run_distillation.py --config distillation_math.yaml
uv run examples/run_distillation.py loss_fn.kl_type=reverse distillation.topk_logits_k=16
uv run examples/run_distillation.py --dry-run                      resolve and validate the configuration only
"""

import sys

from nemo_rl.command_line import run_command
from nemo_rl.launch.recipe_commands import DISTILLATION_JOB

HINT = "NeMo-RL's default is --config distillation_math"

if __name__ == "__main__":
    sys.exit(run_command(DISTILLATION_JOB.command(__doc__ or "", "distillation", hint=HINT)))
