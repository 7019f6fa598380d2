"""Train a model on preferences, by direct preference optimization (DPO).

uv run examples/run_dpo.py                                         the quickstart: two CPU cores, a minute or two
uv run examples/run_dpo.py data.train.dataset_name=jsonl data.train.data_path=pairs.jsonl
uv run examples/run_dpo.py --dry-run                               resolve and validate the configuration only
"""

import sys

from nemo_rl.command_line import run_command
from nemo_rl.launch.recipe_commands import DPO_JOB

HINT = "NeMo-RL's default is --config dpo"

if __name__ == "__main__":
    sys.exit(run_command(DPO_JOB.command(__doc__ or "", "dpo_quickstart", hint=HINT)))
