"""NeMo-RL's name of a script that this project does not have: it says what to run."""

import sys

from nemo_rl.command_line import ExitCode

if __name__ == "__main__":
    sys.stderr.write(
        "PPO with a value model is not implemented; nearest: examples/run_grpo.py --config reinforce_plus_plus\n"
    )
    sys.exit(ExitCode.BAD_INPUT)
