"""examples/run_grpo.py, with each answer of the engine to a rollout in the file RECORD: its prompt and its tokens."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from nemo_rl.command_line import run_command
from nemo_rl.generation.vllm.engine import VllmGeneration
from nemo_rl.launch.recipe_commands import GRPO_JOB
from nemo_rl.types import Completion

answer = VllmGeneration._answer


async def recorded_answer(self: VllmGeneration, request: Any) -> Any:
    result = await answer(self, request)
    if isinstance(result, Completion) and request.session_id != "verify":  # which compares weights after a refit
        record(list(request.token_ids), list(result.token_ids))
    return result


def record(prompt: list[int], tokens: list[int]) -> None:
    with Path(os.environ["RECORD"]).open("a") as file:
        file.write(json.dumps([prompt, tokens]) + "\n")


if __name__ == "__main__":
    VllmGeneration._answer = recorded_answer  # type: ignore[method-assign]
    sys.exit(run_command(GRPO_JOB.command(__doc__ or "", "quickstart")))
