"""NeMo-RL's name of a script that this project does not have: it says what to run."""

import sys

from nemo_rl.command_line import ExitCode

if __name__ == "__main__":
    sys.stderr.write(
        "a teacher with another tokenizer: examples/run_distillation.py --config distillation_cross_tokenizer\n"
    )
    sys.exit(ExitCode.BAD_INPUT)
