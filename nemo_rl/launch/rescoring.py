"""Stored rollouts scored again by the scorers of a recipe."""

from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from nemo_rl.config.master import TrainingRunConfig
from nemo_rl.data.rows import read_jsonl
from nemo_rl.errors import ConfigError
from nemo_rl.experience.cancellation import run_async
from nemo_rl.experience.rescoring import PromptKey, rescore_rollouts
from nemo_rl.experience.rollout_rows import encode_json_line
from nemo_rl.launch.resolved_run import load_prompts
from nemo_rl.launch.rollout_layer import open_scorers
from nemo_rl.types import Prompt


@dataclass(slots=True)
class MeanReward:
    """Running mean over the rollouts that have a reward."""

    total: float = 0.0
    num_rewarded: int = 0
    num_failed: int = 0

    def add(self, row: Mapping[str, Any]) -> None:
        reward = row.get("reward")
        if reward is None:
            self.num_failed += 1
        else:
            self.total += reward
            self.num_rewarded += 1

    def __str__(self) -> str:
        mean = f"{self.total / self.num_rewarded:.4f}" if self.num_rewarded else "none"
        return f"mean reward {mean} over {self.num_rewarded} rollouts, {self.num_failed} failed"


def rescore_file(config: TrainingRunConfig, rollouts: Path, output: Path) -> tuple[MeanReward, MeanReward]:
    """Write every line of `rollouts` with new rewards to `output`, atomically; return the mean rewards before and
    after.

    Raises ConfigError without scorers and for an `output` that exists, DataError for a line that is no rollout.
    """
    if not config.scorers:
        raise ConfigError("scorers", {}, "there is nothing to score with")
    if output.exists():
        raise ConfigError("output", str(output), "exists already")
    train, validation = load_prompts(config)
    prompts = {(p.dataset, p.prompt_id): p for prompt_set in (train, *validation) for p in prompt_set.prompts}
    before, after = MeanReward(), MeanReward()
    unfinished = output.with_name(f".{output.name}.unfinished")
    with unfinished.open("wb") as file:
        run_async(_write(_tally_rewards(read_jsonl(rollouts), before), file, config, prompts, after))
    unfinished.replace(output)
    return before, after


async def _write(
    rows: Iterator[dict[str, Any]],
    file: BinaryIO,
    config: TrainingRunConfig,
    prompts: Mapping[PromptKey, Prompt],
    mean: MeanReward,
) -> None:
    async with AsyncExitStack() as stack:
        scoring = await open_scorers(config, stack)
        alone = {name for name, section in config.env.items() if not section.has_own_rewards}
        limit_s = config.rollout.stall_timeout_s
        async for row in rescore_rollouts(rows, prompts, scoring, scorer_only_tasks=alone, stall_timeout_s=limit_s):
            file.write(encode_json_line(row))
            mean.add(row)


def _tally_rewards(rows: Iterator[dict[str, Any]], mean: MeanReward) -> Iterator[dict[str, Any]]:
    for row in rows:
        mean.add(row)
        yield row
