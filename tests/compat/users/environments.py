"""Environments as users of NeMo-RL write them: classes that get their section of the recipe as `cfg`."""

from typing import Any, TypedDict

import torch

from nemo_rl.data.interfaces import LLMMessageLogType
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn


class AnswerMetadata(TypedDict):
    ground_truth: str


class SpellingEnvironment(EnvironmentInterface[AnswerMetadata]):
    """The share of the answer's letters that the response has, and a bonus for the right first one."""

    def __init__(self, cfg: dict[str, Any]):
        self.bonus = cfg["bonus"]

    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[AnswerMetadata]
    ) -> EnvironmentReturn[AnswerMetadata]:
        said = [str(log[-1]["content"]) for log in message_log_batch]
        right = [one["ground_truth"] for one in metadata]
        rewards = [
            len(set(text) & set(truth)) / len(set(truth)) + self.bonus * (text[:1] == truth[:1])
            for text, truth in zip(said, right, strict=True)
        ]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "done"}] * len(said),
            metadata=metadata,
            next_stop_strings=[None] * len(said),
            rewards=torch.tensor(rewards),
            terminateds=torch.ones(len(said), dtype=torch.bool),
            answers=said,
        )

    def global_post_process_and_metrics(self, batch: BatchedDataDict[Any]) -> tuple[BatchedDataDict[Any], dict]:
        return batch, {}


class GuessMetadata(TypedDict):
    ground_truth: str
    turn: int


class GuessingEnvironment(EnvironmentInterface[GuessMetadata]):
    """Says the next letter of the answer in each turn; the reward of the last is the share of them in the response."""

    def __init__(self, cfg: dict[str, Any]):
        self.num_turns = cfg["num_turns"]

    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[GuessMetadata]
    ) -> EnvironmentReturn[GuessMetadata]:
        turns = [one.get("turn", 0) + 1 for one in metadata]
        done = [turn >= self.num_turns for turn in turns]
        texts = [str(log[-1]["content"]) for log in message_log_batch]
        truths = [one["ground_truth"] for one in metadata]
        scores = [len(set(text) & set(truth)) / len(set(truth)) for text, truth in zip(texts, truths, strict=True)]
        return EnvironmentReturn(
            observations=[
                {"role": "environment", "content": truth[turn - 1]} for truth, turn in zip(truths, turns, strict=True)
            ],
            metadata=[
                None if is_done else {"ground_truth": truth, "turn": turn}
                for is_done, truth, turn in zip(done, truths, turns, strict=True)
            ],
            next_stop_strings=[None] * len(texts),
            rewards=torch.tensor([score * is_done for score, is_done in zip(scores, done, strict=True)]),
            terminateds=torch.tensor(done),
        )

    def global_post_process_and_metrics(self, batch: BatchedDataDict[Any]) -> tuple[BatchedDataDict[Any], dict]:
        return batch, {}
