"""`nemo-rl` for tests of jobs: `collect` is a loop over the real store, all else the real commands.

For each rollout it asks its server. While the file `hold-SEED-CHUNK` stands in the directory STEPS it goes no further
than as many rollouts as that file says; a requeued task does not look.
"""

import os
import sys
import time
import urllib.request
from pathlib import Path

import yaml

from nemo_rl.cli import run
from nemo_rl.collect.shards import Chunk, KeySpace
from nemo_rl.collect.store import RolloutStore

NUM_TASKS = 6
POLL_S = 0.05


def collect(arguments: list[str]) -> int:
    options = dict(argument.split("=", 1) for argument in arguments[2:])
    section = yaml.safe_load(Path(arguments[1]).read_text())["collect"]
    seed, chunk = int(options["collect.seeds"]), _chunk(options.get("collect.chunk"))
    keys = KeySpace(NUM_TASKS, section["num_repeats"], chunk)
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", 0))
    hold = Path(os.environ["STEPS"]) / f"hold-{seed}-{chunk.index if chunk else 0}"
    with RolloutStore.open(section["output_dir"], seed=seed, keys=keys, identity={"model": "none"}) as store:
        for key in store.missing():
            while not restarts and hold.exists() and store.num_finished >= int(hold.read_text()):
                time.sleep(POLL_S)
            row = {"reward": 1.0, "job": _job(), "server": _ask(options.get("server.address"))}
            store.append(key, row)
        store.finish()
    return 0


def _chunk(text: str | None) -> Chunk | None:
    if text is None:
        return None
    index, _, count = text.partition("/")
    return Chunk(int(index), int(count))


def _job() -> str:
    return f"{os.environ['SLURM_ARRAY_JOB_ID']}.{os.environ.get('SLURM_RESTART_COUNT', 0)}"


def _ask(address: str | None) -> str:
    if address is None:
        return "none"
    request = urllib.request.Request(f"{address}/chat/completions", data=b"{}", method="POST")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    sys.exit(collect(rest) if command == "collect" else run([command, *rest]))
