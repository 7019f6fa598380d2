"""Four environments in the style of NeMo-RL's, as its users write them: they know nothing of this project."""

import contextlib
import io
import os
from typing import Any, TypedDict

import ray
import torch

from nemo_rl.data.interfaces import LLMMessageLogType
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.environments.metrics import calculate_pass_rate_per_prompt
from nemo_rl.environments.utils import chunk_list_to_workers


class MathMetadata(TypedDict):
    ground_truth: str


@ray.remote(num_cpus=0)
class VerifyWorker:
    def verify(self, responses: list[str], truths: list[str]) -> list[float]:
        return [float(r.rpartition("=")[2].strip() == t) for r, t in zip(responses, truths, strict=True)]


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, runtime_env={"env_vars": {"VERIFIER": "exact"}})
class MathEnvironment(EnvironmentInterface[MathMetadata]):
    DEFAULT_PY_EXECUTABLE = PY_EXECUTABLES.SYSTEM

    def __init__(self, cfg: dict[str, Any]):
        assert os.environ["VERIFIER"] == "exact"
        self.num_workers = cfg["num_workers"]
        self.workers: list[Any] = [VerifyWorker.remote() for _ in range(self.num_workers)]

    def shutdown(self) -> None:
        for worker in self.workers:
            ray.kill(worker)

    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[MathMetadata]
    ) -> EnvironmentReturn[MathMetadata]:
        responses = ["".join(str(m["content"]) for m in log if m["role"] == "assistant") for log in message_log_batch]
        truths = [m["ground_truth"] for m in metadata]
        chunks = zip(
            self.workers,
            chunk_list_to_workers(responses, self.num_workers),
            chunk_list_to_workers(truths, self.num_workers),
            strict=True,
        )
        results = ray.get([worker.verify.remote(r, t) for worker, r, t in chunks])
        rewards = torch.tensor([score for part in results for score in part])
        said = ["Environment: correct" if score else "Environment: incorrect" for score in rewards]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": text} for text in said],
            metadata=metadata,
            next_stop_strings=[None] * len(message_log_batch),
            rewards=rewards,
            terminateds=torch.ones_like(rewards),
            answers=responses,
        )

    def global_post_process_and_metrics(self, batch: BatchedDataDict[Any]) -> tuple[BatchedDataDict[Any], dict]:
        rate = calculate_pass_rate_per_prompt(batch["text"], batch["rewards"])
        return batch, {"pass@samples_per_prompt": rate}


class CodeMetadata(TypedDict):
    context: dict[str, Any]


class CodeEnvironment(EnvironmentInterface[CodeMetadata]):
    """Runs <code> of each response and answers with its output; the variables last through the conversation."""

    def __init__(self, cfg: dict[str, Any]):
        self.terminate_on_evaluation = cfg["terminate_on_evaluation"]

    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[CodeMetadata]
    ) -> EnvironmentReturn[CodeMetadata]:
        observations, done = [], []
        for log, info in zip(message_log_batch, metadata, strict=True):
            code = str(log[-1]["content"]).partition("<code>")[2].partition("</code>")[0]
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(code, info["context"])
            info["context"].pop("__builtins__", None)
            observations.append({"role": "environment", "content": f"<result>{output.getvalue().strip()}</result>"})
            done.append(bool(code) and self.terminate_on_evaluation)
        return EnvironmentReturn(
            observations=observations,
            metadata=metadata,
            next_stop_strings=[["</code>"]] * len(metadata),
            rewards=torch.zeros(len(metadata)),
            terminateds=torch.tensor(done),
            answers=None,
        )

    def global_post_process_and_metrics(self, batch: BatchedDataDict[Any]) -> tuple[BatchedDataDict[Any], dict]:
        return batch, {}


class PuzzleMetadata(TypedDict):
    value: int
    goal: int
    num_moves: int


class PuzzleEnvironment(EnvironmentInterface[PuzzleMetadata]):
    """Steps of one up or down to a goal; an invalid move says so and leaves the state as it is: metadata None."""

    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[PuzzleMetadata]
    ) -> EnvironmentReturn[PuzzleMetadata]:
        results = [self._move(log, info) for log, info in zip(message_log_batch, metadata, strict=True)]
        said, after, rewards, done = map(list, zip(*results, strict=True))
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": text} for text in said],
            metadata=after,
            next_stop_strings=[["</move>"]] * len(metadata),
            rewards=torch.tensor(rewards),
            terminateds=torch.tensor(done, dtype=torch.bool),
            answers=[None] * len(metadata),
        )

    def _move(self, log: LLMMessageLogType, info: PuzzleMetadata) -> tuple[str, PuzzleMetadata | None, float, bool]:
        move = {"up": 1, "down": -1}.get(str(log[-1]["content"]).strip())
        if move is None:
            return "Invalid move. Say up or down.", None, 0.0, False
        value, moves = info["value"] + move, info["num_moves"] + 1
        if value == info["goal"]:
            return f"Solved in {moves}.", None, 1.0, True
        return f"At {value}.", {"value": value, "goal": info["goal"], "num_moves": moves}, 0.0, False

    def global_post_process_and_metrics(self, batch: BatchedDataDict[Any]) -> tuple[BatchedDataDict[Any], dict]:
        return batch, {"success": batch["total_reward"].mean().item()}


class MultiRewardEnvironment(EnvironmentInterface[MathMetadata]):
    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[MathMetadata]
    ) -> EnvironmentReturn[MathMetadata]:
        texts = [str(log[-1]["content"]) for log in message_log_batch]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""}] * len(texts),
            metadata=metadata,
            next_stop_strings=[None] * len(texts),
            rewards={
                "correctness": torch.tensor(
                    [float(m["ground_truth"] in t) for t, m in zip(texts, metadata, strict=True)]
                ),
                "integer": torch.tensor([float(t.isdigit()) for t in texts]),
            },
            terminateds=torch.ones(len(texts)),
            answers=texts,
        )

    def global_post_process_and_metrics(self, batch: BatchedDataDict[Any]) -> tuple[BatchedDataDict[Any], dict]:
        return batch, {}
