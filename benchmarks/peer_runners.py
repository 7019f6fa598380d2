"""The two sides of benchmarks/peers.py: TRL and this project, each a process that trains a step at each command.

A side reads commands from standard input and answers each with a line of JSON: `step` trains one step, `evaluate`
measures the weights on the held-out prompts, `end` stops. Everything else that it prints goes to standard error. Each
side runs in the virtual environment of its own trainer, so this file imports neither at its head.

    python benchmarks/peer_runners.py trl work.json
    python benchmarks/peer_runners.py own work.json
"""

import asyncio
import functools
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

Work = dict[str, Any]  # see peers.make_work


class Channel:
    """The commands of peers.py and the answers to them."""

    def __init__(self) -> None:
        self._answers: TextIO = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print is no answer

    def read(self) -> str:
        """Return the next command; the end of the input ends the run."""
        return sys.stdin.readline().strip() or "end"

    def write(self, **answer: float) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()


def held_out_accuracy(model: Any, rows: Sequence[dict[str, list[int]]]) -> dict[str, float]:
    """Return the probability of the right answer, and the share of prompts whose greedy answer is right.

    The probability is exact: that of the answer's tokens and the end-of-sequence token after the prompt. It is the
    expectation of the accuracy sampled at temperature 1, without the noise of sampling.
    """
    import torch

    width = max(len(row["token_ids"]) + len(row["answer_ids"]) for row in rows)
    token_ids = torch.zeros(len(rows), width, dtype=torch.long)
    is_answer = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, row in enumerate(rows):
        start, end = len(row["token_ids"]), len(row["token_ids"]) + len(row["answer_ids"])
        token_ids[index, :end] = torch.tensor(row["token_ids"] + row["answer_ids"])
        is_answer[index, start:end] = True
    with torch.no_grad():  # padding follows what it could change
        logprobs = model(input_ids=token_ids).logits[:, :-1].float().log_softmax(-1)
    targets, of_answer = token_ids[:, 1:], is_answer[:, 1:]
    answer = logprobs.gather(-1, targets[..., None])[..., 0].where(of_answer, 0.0)
    is_greedy = (logprobs.argmax(-1) == targets) | ~of_answer
    return {"sampled": answer.sum(-1).exp().mean().item(), "greedy": is_greedy.all(-1).float().mean().item()}


def share_of_e(text: str) -> float:
    """Return a reward that differs inside a group, where nothing is to be learnt."""
    return text.count("e") / 64


# TRL


def make_trl_reward(work: Work, eos: int, mean_rewards: list[float]) -> Callable[..., list[float]]:
    """Return the reward function of the work; each call appends its mean to `mean_rewards`."""
    from reasoning_gym.factory import get_score_answer_fn

    def reward(completions: list[Any], completion_ids: list[list[int]], entry: list[str], **_: object) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        if work["reward"] == "spell":
            score: Any = get_score_answer_fn("spell_backward")
            scored = zip(texts, completion_ids, entry, strict=True)
            rewards = [float(ids[-1] == eos and score(text.strip(), json.loads(row)) >= 1) for text, ids, row in scored]
        else:
            if work["reward"] == "slow":
                for _ in texts:
                    time.sleep(0.01)
            rewards = [share_of_e(text) for text in texts]
        mean_rewards.append(sum(rewards) / len(rewards))
        return rewards

    return reward


def start_engines_eagerly() -> None:
    """Start vLLM on a CPU without compilation, as this project does: TRL has no option for it."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        module: Any = importlib.import_module("trl.generation.vllm_generation")
        module.LLM = functools.partial(module.LLM, enforce_eager=True)


def replace_refit(generation: Any) -> None:
    """Load weights into vLLM's CPU engine by its layerwise reload: TRL's own `sync_weights` crashes there."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return

    def sync_weights() -> None:
        engine = generation.llm.llm_engine
        runner = engine.model_executor.driver_worker.worker.model_runner
        model = runner.get_model()
        weights = [(name, parameter.data) for name, parameter in generation.model.named_parameters()]
        with torch.no_grad(), set_current_vllm_config(engine.vllm_config):
            initialize_layerwise_reload(model)
            model.load_weights(iter(weights))
            finalize_layerwise_reload(model, engine.vllm_config.model_config)
            for layer in model.modules():
                if isinstance(layer, ParallelLMHead):
                    layer.quant_method.process_weights_after_loading(layer)
        generation.llm.reset_prefix_cache()

    generation.sync_weights = sync_weights


def run_trl(work: Work, channel: Channel) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    trl: Any = importlib.import_module("trl")  # in its own environment only

    class Ended(Exception):
        pass

    class Commands(TrainerCallback):
        """Answers the last command before a step, so that all that TRL does in one is counted, and awaits the next."""

        trainer: Any
        started: float | None = None

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if self.started is None:
                torch.manual_seed(work["trl"]["seed"])  # vLLM's engine in this process has seeded all runs alike
                channel.write(ready=1)
            else:
                channel.write(seconds=time.perf_counter() - self.started, reward=mean_rewards[-1])
            while (command := channel.read()) != "step":
                if command == "end":
                    raise Ended
                channel.write(**held_out_accuracy(self.trainer.model, work["held_out"]))
            self.started = time.perf_counter()

    tokenizer = AutoTokenizer.from_pretrained(work["model"])
    rows = work["train"]
    prompts = [row["messages"] for row in rows]
    encoded = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=True, return_dict=True)
    if encoded["input_ids"] != [row["token_ids"] for row in rows]:
        raise ValueError("TRL's prompts are not those of this project, token for token")
    start_engines_eagerly()
    mean_rewards: list[float] = []
    commands = Commands()
    with tempfile.TemporaryDirectory() as directory:
        commands.trainer = trl.GRPOTrainer(
            model=work["model"],
            reward_funcs=make_trl_reward(work, tokenizer.eos_token_id, mean_rewards),
            args=trl.GRPOConfig(output_dir=directory, max_steps=work["num_steps"] + 1, **work["trl"]),
            train_dataset=Dataset.from_dict({"prompt": prompts, "entry": [json.dumps(row["entry"]) for row in rows]}),
            processing_class=tokenizer,
            callbacks=[commands],
        )
        replace_refit(commands.trainer.vllm_generation)
        try:
            commands.trainer.train()
        except Ended:
            return


# This project


async def run_own(work: Work, channel: Channel) -> None:
    from transformers import AutoModelForCausalLM

    from nemo_rl.algorithms.checkpoint_writer import CheckpointWriter, restore
    from nemo_rl.algorithms.loop import make_observers, train_one_step
    from nemo_rl.algorithms.training_progress import TrainingProgress
    from nemo_rl.config.loading import load_config
    from nemo_rl.launch.training import open_run

    with tempfile.TemporaryDirectory() as log_dir:
        config = load_config(Path(work["recipe"]), [*work["overrides"], f"logger.log_dir={log_dir}"])
        async with open_run(config) as run:
            shadow = AutoModelForCausalLM.from_pretrained(work["model"]).float()
            training = TrainingProgress(await restore(run), CheckpointWriter(run))
            await run.weight_sync.publish(run.policy, run.generation, weight_version=0)
            channel.write(ready=1)
            while (command := await asyncio.to_thread(channel.read)) != "end":
                if command == "evaluate":
                    weights = await run.policy.run_with_weights(
                        lambda weights: {name: weight.detach().clone() for name, weight in weights}
                    )
                    shadow.load_state_dict(weights, strict=False)
                    channel.write(**held_out_accuracy(shadow, work["held_out"]))
                else:
                    started = time.perf_counter()
                    await train_one_step(run, training, make_observers(run, training))
                    channel.write(seconds=time.perf_counter() - started, reward=training.metrics["reward"])


if __name__ == "__main__":
    side, path = sys.argv[1:]
    answers = Channel()
    loaded = json.loads(Path(path).read_text())
    if side == "trl":
        run_trl(loaded, answers)
    else:
        asyncio.run(run_own(loaded, answers))
