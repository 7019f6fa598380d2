"""Evaluate a model or a checkpoint: pass@k over datasets, and a comparison with another.

uv run examples/run_eval.py                                        the quickstart's model before training
uv run examples/run_eval.py policy.model_name=runs/exp_001/checkpoints/step_150 eval.baseline=nemo_rl/quickstart
uv run examples/run_eval.py policy.generation.temperature=0 eval.num_tests_per_prompt=1      greedy
uv run examples/run_eval.py --dry-run                              resolve and validate the configuration only
"""

import sys

from nemo_rl.command_line import run_command
from nemo_rl.launch.recipe_commands import EVAL_JOB

HINT = "NeMo-RL's default is --config evals/eval"

if __name__ == "__main__":
    sys.exit(run_command(EVAL_JOB.command(__doc__ or "", "eval", hint=HINT)))
