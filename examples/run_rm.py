"""Train a reward model on preferences.

uv run examples/run_rm.py                                          the quickstart: two CPU cores, a minute or two
uv run examples/run_rm.py data.train.dataset_name=jsonl data.train.data_path=pairs.jsonl
uv run examples/run_rm.py --dry-run                                resolve and validate the configuration only
"""

import sys
from pathlib import Path

from nemo_rl.launch.commands import REWARD_MODEL_JOB, run_command

QUICKSTART = Path(__file__).parent / "configs" / "rm_quickstart.yaml"

if __name__ == "__main__":
    sys.exit(run_command(sys.argv[1:], description=__doc__ or "", default_config=QUICKSTART, job=REWARD_MODEL_JOB))
