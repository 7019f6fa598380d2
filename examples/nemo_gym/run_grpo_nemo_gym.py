"""Train with GRPO on environments of NeMo Gym. Same as examples/run_grpo.py, with another default recipe.

uv run examples/nemo_gym/make_rows.py quickstart                   the rows of the quickstart
uv run examples/nemo_gym/run_grpo_nemo_gym.py                      two environments on two CPU cores
uv run examples/nemo_gym/run_grpo_nemo_gym.py --config examples/nemo_gym/grpo_workplace_assistant.yaml
uv run examples/nemo_gym/run_grpo_nemo_gym.py --dry-run            resolve and validate the configuration only
"""

import sys
from pathlib import Path

from nemo_rl.command_line import run_command
from nemo_rl.launch.recipe_commands import GRPO_JOB

QUICKSTART = Path(__file__).parent / "quickstart.yaml"

if __name__ == "__main__":
    sys.exit(run_command(GRPO_JOB.command(__doc__ or "", QUICKSTART)))
