from pathlib import Path
from typing import Any

import pytest
from jinja2 import Environment

from nemo_rl.config.data import DatasetConfig
from nemo_rl.config.loading import (
    load_config,
    load_distillation_config,
    load_dpo_config,
    load_eval_config,
    load_reward_model_config,
    load_sft_config,
    resolved_yaml,
)
from nemo_rl.config.recipe_files import at
from nemo_rl.environments.reasoning_gym import ReasoningGymEnvironmentConfig
from nemo_rl.environments.scorers.reward_model import RewardModelScorerConfig
from nemo_rl.recipes import find_recipe

REPOSITORY = Path(__file__).parents[3]
RECIPES = REPOSITORY / "examples" / "configs"
REWARD_MODEL = "rm_quickstart.yaml"  # of run_rm.py, which has a schema of its own
OTHERS = (
    "rm",
    "collect",
    "distillation",
    "dpo",
    "eval",
    "sft",
)  # beginnings of recipes with schemas of their own


@pytest.fixture(autouse=True)
def _start_in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)  # recipes name their prompt files from there


def load(name: str, *overrides: str) -> Any:  # a GRPORunConfig, whose sections of kinds are typed by their base
    return load_config(RECIPES / name, overrides)


@pytest.mark.parametrize(
    "name", sorted(path.name for path in RECIPES.glob("*.yaml") if not path.name.startswith(OTHERS))
)
def test_every_recipe_loads_and_its_resolved_form_is_the_same_config(name: str, tmp_path: Path) -> None:
    config = load(name)
    path = tmp_path / "config.yaml"
    path.write_text(resolved_yaml(config))
    assert load_config(path) == config


@pytest.mark.parametrize("name", sorted(path.name for path in RECIPES.glob("distillation*.yaml")))
def test_every_recipe_of_distillation_loads_and_its_resolved_form_is_the_same_config(name: str, tmp_path: Path) -> None:
    config = load_distillation_config(RECIPES / name)
    path = tmp_path / "config.yaml"
    path.write_text(resolved_yaml(config))
    assert load_distillation_config(path) == config


def test_distillation_math_has_nemo_rls_sizes() -> None:
    config: Any = load_distillation_config(RECIPES / "distillation_math.yaml")
    distillation, teacher = config.distillation, config.teacher
    assert (distillation.num_prompts_per_step, distillation.num_generations_per_prompt) == (128, 1)
    assert (distillation.topk_logits_k, config.loss_fn.kl_type) == (64, "mixed")
    assert teacher is not None
    assert (config.policy.model_name, teacher.model_name) == ("Qwen/Qwen3-1.7B-Base", "Qwen/Qwen3-4B")


def test_grpo_math_1b_has_nemo_rls_sizes() -> None:
    config = load("grpo_math_1B.yaml")
    assert (config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt) == (32, 16)
    assert config.grpo.adv_estimator.name == "grpo"
    assert config.grpo.adv_estimator.use_leave_one_out_baseline
    assert config.loss_fn.reference_policy_kl_penalty == 0.01
    assert config.policy.model_name == config.policy.tokenizer.name == "Qwen/Qwen2.5-1.5B"
    assert config.policy.train_global_batch_size == 512
    assert config.policy.generation.vllm_cfg.max_model_len == 512
    assert isinstance(config.policy.scheduler, list)
    assert [stage.milestones for stage in config.policy.scheduler] == [None, None, [50]]
    assert config.checkpointing.metric_name == "val:accuracy"


def test_dapo_clips_higher_and_samples_dynamically() -> None:
    config = load("dapo.yaml")
    assert config.grpo.use_dynamic_sampling
    assert config.grpo.reward_shaping.enabled
    assert config.grpo.reward_scaling.target_min == -1.0
    assert (config.loss_fn.ratio_clip_min, config.loss_fn.ratio_clip_max) == (0.2, 0.28)
    assert config.loss_fn.token_level_loss
    assert config.loss_fn.reference_policy_kl_penalty == 0.0


def test_dr_grpo_divides_by_no_standard_deviation() -> None:
    estimator = load("dr_grpo.yaml").grpo.adv_estimator
    assert (estimator.name, estimator.normalize_rewards, estimator.use_leave_one_out_baseline) == ("grpo", False, False)


def test_gspo_has_one_ratio_a_sequence() -> None:
    config = load("gspo.yaml")
    assert config.loss_fn.type == "gspo"
    assert not config.loss_fn.token_level_loss
    assert (config.loss_fn.ratio_clip_min, config.loss_fn.ratio_clip_max) == (3e-4, 4e-4)
    assert config.policy.train_global_batch_size == 128


def test_cispo_has_no_lower_bound() -> None:
    loss = load("cispo.yaml").loss_fn
    assert (loss.type, loss.ratio_clip_min, loss.ratio_clip_max, loss.ratio_clip_c) == ("cispo", 1.0, 0.8, None)


def test_rloo_is_reinforce_with_a_leave_one_out_baseline() -> None:
    config = load("rloo.yaml")
    assert config.loss_fn.type == "reinforce"
    estimator = config.grpo.adv_estimator
    assert (estimator.normalize_rewards, estimator.use_leave_one_out_baseline) == (False, True)


def test_reinforce_plus_plus_has_the_kl_in_the_reward() -> None:
    config = load("reinforce_plus_plus.yaml")
    assert config.grpo.adv_estimator.name == "reinforce_plus_plus"
    assert config.grpo.adv_estimator.minus_baseline
    assert config.loss_fn.use_kl_in_reward
    assert config.loss_fn.reference_policy_kl_penalty == 0.01


def test_quickstart_is_the_measured_one() -> None:
    config = load("quickstart.yaml")
    grpo, policy = config.grpo, config.policy
    assert (grpo.num_prompts_per_step, grpo.num_generations_per_prompt, grpo.max_num_steps) == (32, 8, 150)
    assert (grpo.val_period, grpo.val_at_start, grpo.val_greedy, grpo.max_val_samples) == (50, True, True, 200)
    assert (policy.model_name, policy.precision) == ("nemo_rl/quickstart", "float32")
    assert policy.train_global_batch_size == policy.train_micro_batch_size == 256
    assert policy.optimizer.kwargs == {"lr": 3e-4, "weight_decay": 0.0, "betas": [0.9, 0.95]}
    assert (policy.max_total_sequence_length, policy.generation.max_new_tokens) == (64, 8)
    assert config.loss_fn.reference_policy_kl_penalty == 0.0
    assert config.env["reasoning_gym"] == ReasoningGymEnvironmentConfig(type="reasoning_gym", require_stop=True)
    assert isinstance(config.data.train, DatasetConfig)
    assert config.data.train.task == "spell_backward"
    assert config.data.train.task_kwargs == {"min_word_len": 3, "max_word_len": 5}


def test_async_is_the_quickstart_collected_in_the_background() -> None:
    config, quickstart = load("async.yaml"), load("quickstart.yaml")
    section = config.grpo.async_grpo
    assert (section.enabled, section.max_trajectory_age_steps, section.in_flight_weight_updates) == (True, 1, True)
    assert section.recompute_kv_cache_after_weight_updates
    loss = config.loss_fn
    assert loss.use_importance_sampling_correction
    assert (loss.truncated_importance_sampling_type, loss.truncated_importance_sampling_ratio) == ("tis", 2.0)
    assert (config.policy, config.data) == (quickstart.policy, quickstart.data)


def test_quickstarts_batches_follow_the_number_of_prompts() -> None:
    policy = load("quickstart.yaml", "grpo.num_prompts_per_step=4").policy
    assert policy.train_global_batch_size == policy.train_micro_batch_size == 32


def test_the_reward_models_recipe_loads_and_its_resolved_form_is_the_same_config(tmp_path: Path) -> None:
    config = load_reward_model_config(RECIPES / REWARD_MODEL)
    path = tmp_path / "config.yaml"
    path.write_text(resolved_yaml(config))
    assert load_reward_model_config(path) == config


def test_grpo_scores_with_the_directory_that_run_rm_writes_and_validates_on_the_true_answers() -> None:
    config, trained = load("reward_model.yaml"), load_reward_model_config(RECIPES / REWARD_MODEL)
    section = config.scorers["rm"]
    assert isinstance(section, RewardModelScorerConfig)
    assert section.model_name == trained.checkpointing.checkpoint_dir
    assert isinstance(config.data.train, DatasetConfig)
    assert isinstance(config.data.validation, DatasetConfig)
    assert config.env[str(config.data.train.env_name)].scorers == ["rm"]
    assert config.env[str(config.data.validation.env_name)].type == "reasoning_gym"


# Values of NeMo-RL's recipes of these names, by the paths there.
BASE_RECIPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "grpo_math_1B.yaml": (load_config, {
        "grpo.num_prompts_per_step": 32, "grpo.val_at_end": False, "policy.optimizer.kwargs.lr": 5e-6,
        "policy.max_total_sequence_length": 512, "loss_fn.reference_policy_kl_penalty": 0.01,
        "data.train.split_validation_size": 0.05, "data.overlong": "mask", "data.disjoint": False,
    }),
    "grpo_math_8B.yaml": (load_config, {
        "grpo.num_prompts_per_step": 64, "grpo.num_generations_per_prompt": 32, "policy.optimizer.kwargs.lr": 3e-7,
        "policy.logprob_batch_size": 2, "policy.max_total_sequence_length": 4096, "cluster.gpus_per_node": 8,
        "policy.generation.max_new_tokens": 4096, "policy.scheduler.2.milestones": [13],
    }),
    "grpo_math_1B_megatron.yaml": (load_config, {
        "policy.megatron_cfg.optimizer.lr": 5e-6, "policy.megatron_cfg.optimizer.min_lr": 5e-7,
        "policy.megatron_cfg.scheduler.lr_warmup_iters": 13, "policy.megatron_cfg.scheduler.lr_warmup_init": 5e-7,
        "policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32": False,
        "checkpointing.enabled": False, "policy.train_global_batch_size": 512,
    }),
    "grpo_math_8B_megatron.yaml": (load_config, {
        "policy.megatron_cfg.pipeline_model_parallel_size": 2, "policy.megatron_cfg.optimizer.lr": 3e-7,
        "policy.megatron_cfg.scheduler.lr_warmup_init": 3e-8, "policy.logprob_batch_size": 4,
        "grpo.num_generations_per_prompt": 32,
    }),
    "grpo_sliding_puzzle.yaml": (load_config, {
        "grpo.max_rollout_turns": 50, "grpo.max_num_steps": 10000, "policy.generation.top_p": 0.999,
        "policy.generation.top_k": 10000, "env.sliding_puzzle_game.max_moves": 30,
        "policy.dtensor_cfg.cpu_offload": True,
    }),
    "grpo_rm_1B.yaml": (load_config, {
        "scorers.reward_model.model_name": "Skywork/Skywork-Reward-V2-Qwen3-0.6B", "cluster.gpus_per_node": 2,
        "scorers.reward_model.micro_batch_size": 4, "scorers.reward_model.max_length": 2048,
    }),
    "sft.yaml": (load_sft_config, {
        "sft.max_num_steps": 60, "sft.val_micro_batch_size": 1, "policy.optimizer.kwargs.eps": 1e-5,
        "policy.optimizer.kwargs.betas": [0.9, 0.98], "policy.train_global_batch_size": 32, "data.add_bos": True,
        "data.add_eos": True, "data.add_generation_prompt": False, "data.validation.split": "validation",
    }),
    "dpo.yaml": (load_dpo_config, {
        "dpo.max_num_steps": 150, "dpo.reference_policy_kl_penalty": 0.05, "dpo.val_global_batch_size": 8,
        "policy.train_global_batch_size": 128, "policy.train_micro_batch_size": 2,
        "policy.scheduler.2.milestones": [20], "checkpointing.save_period": 50,
    }),
    "rm.yaml": (load_reward_model_config, {
        "rm.val_period": 16, "policy.optimizer.kwargs.lr": 2e-6, "policy.train_global_batch_size": 128,
        "policy.max_total_sequence_length": 8192, "checkpointing.metric_name": "val:loss",
    }),
    "distillation_math.yaml": (load_distillation_config, {
        "distillation.topk_logits_k": 64, "policy.optimizer.kwargs.lr": 2e-5, "distillation.max_num_epochs": 10,
    }),
    "evals/eval.yaml": (load_eval_config, {
        "policy.model_name": "Qwen/Qwen2.5-Math-1.5B-Instruct", "policy.generation.temperature": 0.0,
        "policy.generation.max_new_tokens": 2048, "data.input.dataset_name": "AIME2024",
        "server.gpu_memory_utilization": 0.9,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", BASE_RECIPES)
def test_base_recipes_have_the_names_paths_and_values_of_nemo_rls(name: str) -> None:
    loader, expected = BASE_RECIPES[name]
    values = loader(RECIPES / name).model_dump()
    assert find_recipe(f"examples/configs/{name}") == Path(f"examples/configs/{name}")
    assert find_recipe(name.removesuffix(".yaml")) == RECIPES / name
    for key, value in expected.items():
        assert (key, at(values, key.split("."))) == (key, value)


def test_the_template_of_sft_is_plain_words() -> None:
    template = Environment().from_string(load_sft_config(RECIPES / "sft.yaml").policy.tokenizer.chat_template or "")
    roles = {"system": " a ", "user": "b?", "assistant": "c"}
    messages = [{"role": role, "content": text} for role, text in roles.items()]
    assert template.render(messages=messages) == "Context: a Question: b? Answer: c"


def test_the_template_of_rm_is_llamas_without_a_date() -> None:
    config = load_reward_model_config(RECIPES / "rm.yaml")
    template = Environment().from_string(config.policy.tokenizer.chat_template or "")
    asked = [{"role": "user", "content": " hi "}]
    start, end = "<|start_header_id|>", "<|end_header_id|>\n\n"
    assert template.render(messages=asked, bos_token="<B>") == (
        f"<B>{start}system{end}<|eot_id|>{start}user{end}hi<|eot_id|>"
    )
    system = [{"role": "system", "content": "be"}, *asked]
    assert template.render(messages=system, bos_token="<B>", add_generation_prompt=True) == (
        f"<B>{start}system{end}be<|eot_id|>{start}user{end}hi<|eot_id|>{start}assistant{end}"
    )
