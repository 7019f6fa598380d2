"""NeMo-RL's name of a script that this project does not have: it says what to run."""

import sys

from nemo_rl.command_line import ExitCode

if __name__ == "__main__":
    sys.stderr.write("rollouts in the background: examples/run_grpo.py --config async, or a recipe with async_rl\n")
    sys.exit(ExitCode.BAD_INPUT)
