"""Stands for `nemo-rl run ... -- grpo --config FILE` in a job: counts steps in its checkpoint directory, and saves at
SIGTERM. Its steps wait for the file `go` beside the configuration's logs; `nodes` tells where each start ran."""

import os
import signal
import sys
import time
from pathlib import Path

from omegaconf import OmegaConf

NUM_STEPS = 3


def main() -> int:
    config = OmegaConf.load(sys.argv[sys.argv.index("--config") + 1])
    checkpoints = Path(config.checkpointing.checkpoint_dir)
    checkpoints.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    with (checkpoints / "nodes").open("a") as file:
        file.write(f"{os.environ['SLURMD_NODENAME']}\n")
    path = checkpoints / "step"
    step = int(path.read_text()) if path.exists() else 0
    while step < NUM_STEPS:
        if step == 0 or (checkpoints / "go").exists():
            step += 1
            path.write_text(str(step))
        time.sleep(0.05)
    return 0


if __name__ == "__main__":
    sys.exit(main())
