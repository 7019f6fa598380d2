"""A project's run script with a game of several turns, whose prompts are generated without an end."""

import argparse
import itertools
import random
from collections.abc import Iterator
from typing import Any

import ray
import torch
from omegaconf import OmegaConf
from torch.utils.data import IterableDataset

from nemo_rl.algorithms.grpo import MasterConfig, grpo_train, setup
from nemo_rl.algorithms.utils import get_tokenizer, set_seed
from nemo_rl.data.interfaces import DatumSpec
from nemo_rl.distributed.virtual_cluster import init_ray
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.models.generation import configure_generation_config
from nemo_rl.utils.config import load_config, parse_hydra_overrides, register_omegaconf_resolvers


@ray.remote(num_cpus=0)
class GuessingEnvironment(EnvironmentInterface):
    """Ends when the letter was said, or after two turns."""

    def __init__(self, cfg: dict[str, Any]):
        self.max_turns = cfg["max_turns"]

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn:
        observations, states, rewards, ended = [], [], [], []
        for log, state in zip(message_log_batch, metadata, strict=True):
            is_right = state["letter"] in log[-1]["content"]
            turns = state["turns"] + 1
            observations.append({"role": "environment", "content": f"\nno, turn {turns}\n"})
            ended.append(is_right or turns == self.max_turns)
            rewards.append(float(is_right) + 0.01 * len(log[-1]["content"]))
            states.append(None if ended[-1] else {**state, "turns": turns})
        return EnvironmentReturn(observations, states, [[":"]] * len(ended), torch.tensor(rewards), torch.tensor(ended))

    def global_post_process_and_metrics(self, batch: Any) -> Any:
        return batch, {}


class Letters(IterableDataset):
    def __init__(self, tokenizer: Any, length: int):
        self.tokenizer, self.length = tokenizer, length

    def __iter__(self) -> Iterator[DatumSpec]:
        for index in itertools.count():
            text = f"<|im_start|>user\nguess {random.choice('abc')}<|im_end|>\n<|im_start|>assistant\n"
            ids = self.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"][0]
            yield {
                "message_log": [{"role": "user", "content": text, "token_ids": ids}],
                "length": len(ids),
                "extra_env_info": {"letter": random.choice("xyz"), "turns": 0},
                "loss_multiplier": 1.0,
                "idx": index,
                "task_name": "guessing",
                "stop_strings": [":"],
            }

    def __len__(self) -> int:
        return self.length


def main() -> None:
    register_omegaconf_resolvers()
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=str)
    args, overrides = parser.parse_known_args()
    config = parse_hydra_overrides(load_config(args.config), overrides)
    resolved: Any = OmegaConf.to_container(config, resolve=True)
    config = MasterConfig(**resolved)
    init_ray()
    set_seed(config.grpo["seed"])
    tokenizer = get_tokenizer(config.policy["tokenizer"])
    config.policy["generation"] = configure_generation_config(config.policy["generation"], tokenizer)
    env = GuessingEnvironment.options(num_gpus=0).remote(cfg=dict(config.env["guessing"]["cfg"]))
    tasks = {"guessing": env}
    train, held_out = Letters(tokenizer, 10**6), Letters(tokenizer, 4)
    results = setup(config, tokenizer, train, held_out)
    policy, generation, _, _, loader, val_loader, loss_fn, logger, checkpointer, state, master_config, _, _ = results
    grpo_train(
        policy, generation, loader, val_loader, tokenizer, loss_fn, tasks, tasks, logger, checkpointer, state,
        master_config,
    )  # fmt: skip


if __name__ == "__main__":
    main()
