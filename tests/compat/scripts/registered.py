"""A project's run script in the shape of NeMo-RL 0.7: an environment and a processor by name, data of the recipe."""

import argparse
from typing import Any

import torch
from omegaconf import OmegaConf

from nemo_rl.algorithms.grpo import MasterConfig, grpo_train, setup, shutdown_environments
from nemo_rl.algorithms.utils import get_tokenizer
from nemo_rl.data.interfaces import DatumSpec, TaskDataSpec
from nemo_rl.data.processors import register_processor
from nemo_rl.data.utils import setup_response_data
from nemo_rl.distributed.virtual_cluster import init_ray
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.environments.utils import register_env
from nemo_rl.models.generation import configure_generation_config
from nemo_rl.utils.config import load_config, parse_hydra_overrides, register_omegaconf_resolvers
from nemo_rl.utils.logger import get_next_experiment_dir
from nemo_rl.utils.timer import Timer


class LengthEnvironment(EnvironmentInterface):
    """Rewards answers by their length."""

    def __init__(self, cfg: dict[str, Any]):
        self.scale = cfg["scale"]

    def step(self, message_log_batch: Any, metadata: Any) -> EnvironmentReturn:
        assert all(state["target"] for state in metadata)
        rewards = torch.tensor([self.scale * len(log[-1]["content"]) for log in message_log_batch], dtype=torch.float32)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "done"} for _ in metadata],
            metadata=metadata,
            next_stop_strings=[None] * len(metadata),
            rewards=rewards,
            terminateds=torch.ones_like(rewards),
        )

    def global_post_process_and_metrics(self, batch: Any) -> Any:
        return batch, {}


def length_processor(
    datum_dict: dict[str, Any], task_data_spec: TaskDataSpec, tokenizer: Any, max_seq_length: int, idx: int
) -> DatumSpec:
    question, answer = (message["content"] for message in datum_dict["messages"])
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True, add_special_tokens=False
    )
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"][0]
    return DatumSpec(
        message_log=[{"role": "user", "content": question, "token_ids": ids}],
        length=len(ids),
        extra_env_info={"target": answer},
        loss_multiplier=1.0,
        idx=idx,
        task_name=datum_dict["task_name"],
    )


def main() -> None:
    register_omegaconf_resolvers()
    register_env("length", "registered.LengthEnvironment")
    register_processor("length_processor", length_processor)
    timer = Timer(context={"worker": "driver"})
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=str)
    args, overrides = parser.parse_known_args()
    with timer.time("config"):
        config = parse_hydra_overrides(load_config(args.config), overrides)
        resolved: Any = OmegaConf.to_container(config, resolve=True)
        config = MasterConfig(**resolved)
    config.logger["log_dir"] = get_next_experiment_dir(config.logger["log_dir"])
    init_ray()
    tokenizer = get_tokenizer(config.policy["tokenizer"])
    config.policy["generation"] = configure_generation_config(
        config.policy["generation"], tokenizer, has_refit_draft_weights=False, trains_mtp=False
    )
    dataset, val_dataset, task_to_env, val_task_to_env = setup_response_data(tokenizer, config.data, config.env)
    (
        policy,
        policy_generation,
        _nemo_gym,
        _cluster,
        dataloader,
        val_dataloader,
        loss_fn,
        logger,
        checkpointer,
        grpo_state,
        master_config,
        _teacher_worker_groups,
        _alias_to_group_alias,
    ) = setup(config, tokenizer, dataset, val_dataset, policy_factory=None)
    assert not config.grpo.async_grpo.enabled
    assert not (config.data_plane or {}).get("enabled", False)
    try:
        with checkpointer:
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
    finally:
        shutdown_environments(task_to_env, val_task_to_env)
        policy_generation.shutdown()
    assert timer.get_timing_metrics(reduction_op="sum")["config"] > 0


if __name__ == "__main__":
    main()
