"""Measurement of how long a plan takes: the default is 100 steps with 16,384 rollouts in flight over 2,048 engines.

Steps of 64 groups of 16 at an age of up to 15 keep 16 steps in flight. The work is made up: rollouts of one turn whose
lengths are log-normal. Everything runs on one core.

    python benchmarks/planner.py [--steps 100] [--engines 2048] [--age 15] [--groups 64] [--generations 16]
"""

import argparse
import random
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nemo_rl.trace.plan import Schedule, plan
from nemo_rl.trace.workload import EngineCurve, PlannedRollout, PlannedTurn, TrainerCurve, Workload

MEAN_TOKENS = 2000
NUM_TRACED_GROUPS = 256  # whose sizes are planned again and again
MAX_NUM_SEQS = 8  # of an engine: all rollouts in flight run at once
MAX_SECONDS = 60  # bar of the default


def made_up_work(num_generations: int) -> Workload:
    """Return work of an engine that takes 20 ms for a token, and of a trainer as fast as 2,048 of them."""
    draw = random.Random(0)

    def rollout() -> PlannedRollout:
        tokens = max(int(draw.lognormvariate(0.0, 0.6) * MEAN_TOKENS), 1)
        return PlannedRollout("math", (PlannedTurn(tokens, 0.01),), {})

    groups = [[rollout() for _ in range(num_generations)] for _ in range(NUM_TRACED_GROUPS)]
    return Workload(groups, EngineCurve(0.02, 0.0), TrainerCurve(1.0, 0.0, 1e-6, 1.0), {"weight_sync": 0.5})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--engines", type=int, default=2048)
    parser.add_argument("--age", type=int, default=15)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--generations", type=int, default=16)
    parsed = parser.parse_args()
    schedule = Schedule(parsed.groups, parsed.generations, parsed.age, parsed.engines, MAX_NUM_SEQS, {})
    work = made_up_work(parsed.generations)
    start, cpu = time.perf_counter(), time.process_time()
    planned = plan(work, schedule, num_steps=parsed.steps)
    in_flight = parsed.groups * parsed.generations * (parsed.age + 1)
    print(f"{parsed.steps} steps, {in_flight} rollouts in flight over {parsed.engines} engines:")
    print(f"{time.perf_counter() - start:.1f} s [{MAX_SECONDS}], {time.process_time() - cpu:.1f} s of CPU time")
    print(f"peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")
    print(f"planned: {planned.step_s:.3g} s a step, trainer busy {planned.bubbles.trainer_busy_share:.0%}")


if __name__ == "__main__":
    main()
