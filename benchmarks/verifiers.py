"""Cost of a score of `math` and `reasoning_gym`, at an earlier revision and now, in turns.

uv run benchmarks/verifiers.py --before 9a06b6e --rounds 5

Microseconds of wall time per score, one at a time and 64 at once; and of computing time of the trainer's process.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NUM_SCORES = {"reasoning_gym": 1000, "math": 300}
BAR_US = 200  # more than before


async def measure() -> dict[str, float]:
    import reasoning_gym

    from nemo_rl.environments.math_answers import MathEnvironment, MathEnvironmentConfig
    from nemo_rl.environments.reasoning_gym import ReasoningGymEnvironment, ReasoningGymEnvironmentConfig
    from nemo_rl.types import Message

    entry = reasoning_gym.create_dataset("spell_backward", size=1, seed=3)[0]
    state = {"task": "spell_backward", "entry": entry, "response_truncated": False}
    cases: dict[str, tuple[Any, str, dict[str, Any]]] = {
        "reasoning_gym": (
            ReasoningGymEnvironment("reasoning_gym", ReasoningGymEnvironmentConfig.model_validate({})),
            f"<answer>{entry['answer']}</answer>",
            state,
        ),
        "math": (
            MathEnvironment("math", MathEnvironmentConfig.model_validate({"num_workers": 1})),
            "The answer is \\boxed{72}.",
            {"answer": "72"},
        ),
    }
    found = {}
    for name, (environment, text, state) in cases.items():
        conversation, number = [Message("assistant", text)], NUM_SCORES[name]
        for _ in range(30):
            await environment.step([conversation], [state])
        start, computed = time.perf_counter(), time.process_time()
        for _ in range(number):
            await environment.step([conversation], [state])
        found[f"{name}, one at a time"] = (time.perf_counter() - start) / number * 1e6
        found[f"{name}, computing time of the trainer"] = (time.process_time() - computed) / number * 1e6
        start = time.perf_counter()
        for _ in range(number // 64):
            await asyncio.gather(*(environment.step([conversation], [state]) for _ in range(64)))
        found[f"{name}, 64 at once"] = (time.perf_counter() - start) / (number // 64 * 64) * 1e6
        await environment.close()
    return found


def run(checkout: Path) -> dict[str, float]:
    variables = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, __file__, "--measure"]
    return json.loads(subprocess.run(command, env=variables, check=True, stdout=subprocess.PIPE, cwd=checkout).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default="9a06b6e", help="the earlier revision")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(asyncio.run(measure())))
        return
    with tempfile.TemporaryDirectory() as directory:
        archive = subprocess.run(["git", "archive", args.before], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(["tar", "-x", "-C", directory], input=archive, check=True)
        rounds = [(run(Path(directory)), run(ROOT)) for _ in range(args.rounds)]
    for name in rounds[0][0]:
        before, now = (statistics.median(each[i][name] for each in rounds) for i in (0, 1))
        verdict = "" if "computing" in name else "met" if now - before <= BAR_US else "MISSED"
        print(f"{name:45} {before:7.0f} -> {now:7.0f} us, {now - before:+5.0f} {verdict}")


if __name__ == "__main__":
    main()
