"""NeMo-RL's name of a script that this project does not have: it says what to run."""

import sys

from nemo_rl.command_line import ExitCode

if __name__ == "__main__":
    sys.stderr.write("only text is trained on; with a recipe of text: examples/run_grpo.py\n")
    sys.exit(ExitCode.BAD_INPUT)
