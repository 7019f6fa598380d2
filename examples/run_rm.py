"""Train a reward model on preferences.

uv run examples/run_rm.py                                          the quickstart: two CPU cores, a minute or two
uv run examples/run_rm.py data.train.dataset_name=jsonl data.train.data_path=pairs.jsonl
uv run examples/run_rm.py --dry-run                                resolve and validate the configuration only
"""

import sys

from nemo_rl.command_line import run_command
from nemo_rl.launch.recipe_commands import REWARD_MODEL_JOB

HINT = "NeMo-RL's default is --config rm"

if __name__ == "__main__":
    sys.exit(run_command(REWARD_MODEL_JOB.command(__doc__ or "", "rm_quickstart", hint=HINT)))
