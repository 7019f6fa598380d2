"""A project's run script in the shape of NeMo-RL 0.5: its own dataset, processor and environment in an actor."""

import argparse
import os
from collections import defaultdict
from typing import Any

import ray
import torch
from omegaconf import OmegaConf

from nemo_rl.algorithms.grpo import MasterConfig, grpo_train, setup
from nemo_rl.algorithms.utils import get_tokenizer
from nemo_rl.data import DataConfig
from nemo_rl.data.datasets import AllTaskProcessedDataset
from nemo_rl.data.datasets.response_datasets import ResponseDataset
from nemo_rl.data.interfaces import DatumSpec, TaskDataSpec
from nemo_rl.distributed.ray_actor_environment_registry import get_actor_python_env
from nemo_rl.distributed.virtual_cluster import init_ray
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.models.generation import configure_generation_config
from nemo_rl.utils.config import load_config, parse_hydra_overrides
from nemo_rl.utils.logger import get_next_experiment_dir

OmegaConf.register_new_resolver("mul", lambda a, b: a * b)


@ray.remote(num_cpus=0)
class SpellingEnvironment(EnvironmentInterface):
    """Rewards the share of the word's letters that the answer has."""

    def __init__(self, cfg: dict[str, Any]):
        self.scale = cfg["scale"]

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn:
        rewards = []
        for log, state in zip(message_log_batch, metadata, strict=True):
            assert log[0]["content"].startswith("<|im_start|>user\nSpell"), log  # as the processor rendered it
            said = "".join(m["content"] for m in log if m["role"] == "assistant")
            rewards.append(self.scale * sum(letter in said for letter in state["word"]) / len(state["word"]))
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""}] * len(rewards),
            metadata=metadata,
            next_stop_strings=[None] * len(rewards),
            rewards=torch.tensor(rewards),
            terminateds=torch.ones(len(rewards)),
        )

    def global_post_process_and_metrics(self, batch: Any) -> Any:
        return batch, {}


def spelling_processor(
    datum_dict: dict[str, Any], task_data_spec: TaskDataSpec, tokenizer: Any, max_seq_length: int, idx: int
) -> DatumSpec:
    word = datum_dict["messages"][1]["content"]
    assert task_data_spec.prompt is not None
    question = [{"role": "user", "content": task_data_spec.prompt.format(word)}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"][0]
    return {
        "message_log": [{"role": "user", "content": text, "token_ids": ids}],
        "length": len(ids),
        "extra_env_info": {"word": word},
        "loss_multiplier": 1.0 if len(ids) <= max_seq_length else 0.0,
        "idx": idx,
        "task_name": datum_dict["task_name"],
    }


def setup_data(tokenizer: Any, data_config: DataConfig, env_configs: dict[str, Any]) -> Any:
    spec = TaskDataSpec(task_name="spelling", prompt_file=data_config["prompt_file"])
    data = ResponseDataset(train_data_path=data_config["train_data_path"], input_key="question", output_key="word")
    processors: dict[str, tuple[TaskDataSpec, Any]] = defaultdict(lambda: (spec, spelling_processor))
    processors[data.task_name] = (spec, spelling_processor)
    env = SpellingEnvironment.options(
        runtime_env={"py_executable": get_actor_python_env("spelling.SpellingEnvironment")}
    ).remote(env_configs["spelling"])
    rows = data.formatted_ds["train"]
    dataset = AllTaskProcessedDataset(
        rows, tokenizer, spec, processors, max_seq_length=data_config["max_input_seq_length"]
    )
    task_to_env: dict[str, Any] = defaultdict(lambda: env)
    return dataset, None, task_to_env, task_to_env


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=str, default=os.path.join(os.path.dirname(__file__), "grpo.yaml"))
    args, overrides = parser.parse_known_args()
    config = load_config(args.config)
    if overrides:
        config = parse_hydra_overrides(config, overrides)
    config: MasterConfig = OmegaConf.to_container(config, resolve=True)
    config["logger"]["log_dir"] = get_next_experiment_dir(config["logger"]["log_dir"])
    init_ray()
    tokenizer = get_tokenizer(config["policy"]["tokenizer"])
    config["policy"]["generation"] = configure_generation_config(config["policy"]["generation"], tokenizer)
    dataset, val_dataset, task_to_env, val_task_to_env = setup_data(tokenizer, config["data"], config["env"])
    (
        policy,
        policy_generation,
        _cluster,
        dataloader,
        val_dataloader,
        loss_fn,
        logger,
        checkpointer,
        grpo_state,
        master_config,
    ) = setup(config, tokenizer, dataset, val_dataset)
    grpo_train(
        policy,
        policy_generation,
        dataloader,
        val_dataloader,
        tokenizer,
        loss_fn,
        task_to_env,
        val_task_to_env,
        logger,
        checkpointer,
        grpo_state,
        master_config,
    )


if __name__ == "__main__":
    main()
