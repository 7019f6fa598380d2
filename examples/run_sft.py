"""Train a language model on conversations.

uv run examples/run_sft.py                                         the quickstart: two CPU cores, a minute
uv run examples/run_sft.py --config sft_tulu3.yaml data.train.data_path=chats.jsonl
uv run examples/run_sft.py --dry-run                               resolve and validate the configuration only
"""

import sys

from nemo_rl.command_line import run_command
from nemo_rl.launch.recipe_commands import SFT_JOB

HINT = "NeMo-RL's default is --config sft"

if __name__ == "__main__":
    sys.exit(run_command(SFT_JOB.command(__doc__ or "", "sft_quickstart", hint=HINT)))
