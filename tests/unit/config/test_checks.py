from pathlib import Path
from typing import Any

import pytest

from nemo_rl.config.checks import check_async
from nemo_rl.config.policy import PolicyConfig, check_backend
from nemo_rl.errors import ConfigError
from nemo_rl.experience.rollout_metrics import rollout_metrics
from nemo_rl.metric_names import ranking_metrics
from nemo_rl.types import Prompt, StopReason, Trajectory
from tests.unit.algorithms.run_setup import make_config
from tests.unit.config.conftest import Load

VALIDATION = "data.validation={dataset_name:gsm8k}"
VALIDATIONS = "data.validation=[{dataset_name:gsm8k},{dataset_name:gsm8k}]"
CHECKPOINTS = "checkpointing.enabled=true"
NO_END = "grpo.val_at_end=false"
LOSS = "loss_fn."
SINGLE = ["grpo.num_generations_per_prompt=1", "grpo.num_prompts_per_step=8"]
TIS = "loss_fn.truncated_importance_sampling_"
CORRECTED = "loss_fn.use_importance_sampling_correction=true"


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (["policy.train_global_batch_size=3"], "policy.train_global_batch_size", "divide .* = 8"),
        (["policy.train_global_batch_size=16"], "policy.train_global_batch_size", "divide .* = 8"),
        (["policy.train_micro_batch_size=3"], "policy.train_micro_batch_size", "divide .* = 8"),
        (
            ["policy.sequence_packing.enabled=true", "policy.dynamic_batching.enabled=true"],
            "policy.sequence_packing.enabled",
            r"policy\.dynamic_batching\.enabled is true too",
        ),
        (
            ["policy.sequence_packing.enabled=true", "policy.sequence_packing.logprob_mb_tokens=511"],
            "policy.sequence_packing.logprob_mb_tokens",
            r"at least policy\.max_total_sequence_length = 512",
        ),
        (
            ["policy.dynamic_batching.enabled=true", "policy.dynamic_batching.train_mb_tokens=511"],
            "policy.dynamic_batching.train_mb_tokens",
            r"at least policy\.max_total_sequence_length = 512",
        ),
        (
            ["grpo.adv_estimator.name=opd", "++teacher.model_name=m", "++teacher.sequence_packing.enabled=true"],
            "teacher.sequence_packing.logprob_mb_tokens",
            "required: the tokens of one forward pass",
        ),
        (
            ["policy.router_replay.enabled=true", "++policy.generation.vllm_kwargs.pipeline_parallel_size=2"],
            "policy.generation.vllm_kwargs.pipeline_parallel_size",
            r"policy\.router_replay\.enabled is true, which needs whole engines",
        ),
        (
            ["policy.sequence_packing.share_prefixes=true"],
            "policy.sequence_packing.share_prefixes",
            r"policy\.sequence_packing\.enabled is false: .* allowed: false, or both true",
        ),
        (
            [
                "policy.sequence_packing.enabled=true",
                "policy.sequence_packing.share_prefixes=true",
                "policy.sequence_packing.algorithm=concatenative",
            ],
            "policy.sequence_packing.algorithm",
            r"share_prefixes packs whole groups; allowed: modified_first_fit_decreasing",
        ),
        (
            [
                "policy.sequence_packing.enabled=true",
                "policy.sequence_packing.share_prefixes=true",
                "policy.dtensor_cfg.context_parallel_size=2",
            ],
            "policy.sequence_packing.share_prefixes",
            r"context_parallel_size is 2: trees of prefixes are not cut into slices; allowed: false",
        ),
        (
            ["policy.dtensor_cfg.context_parallel_size=auto"],
            "policy.dtensor_cfg.context_parallel_size",
            r"sequence_packing\.enabled is false, whose train_mb_tokens .*; allowed: a number, or both",
        ),
        (
            [
                "policy.sequence_packing.enabled=true",
                "policy.sequence_packing.share_prefixes=true",
                "policy.dtensor_cfg.sequence_parallel=true",
                "policy.dtensor_cfg.tensor_parallel_size=2",
            ],
            "policy.sequence_packing.share_prefixes",
            r"sequence_parallel is true: trees of prefixes are not cut into slices; allowed: false",
        ),
        (
            [
                "policy.sequence_packing.enabled=true",
                "policy.sequence_packing.share_prefixes=true",
                "policy.megatron_cfg.enabled=true",
            ],
            "policy.sequence_packing.share_prefixes",
            r"the backend Megatron.* does not share prefixes; allowed: false",
        ),
        (
            ["policy.sequence_packing.algorithm=best_fit"],
            "policy.sequence_packing.algorithm",
            "modified_first_fit_decreasing",
        ),
        (
            ["grpo.num_generations_per_prompt=1", "grpo.num_prompts_per_step=8", "grpo.use_dynamic_sampling=true"],
            "grpo.use_dynamic_sampling",
            "would drop every group",
        ),
        *(
            ([*SINGLE, f"grpo.adv_estimator.name={name}"], "grpo.num_generations_per_prompt", "would be 0")
            for name in ("grpo", "gdpo", "reinforce_plus_plus")
        ),
        (["loss_fn.trajectory_token_divisor=512"], "loss_fn.trajectory_token_divisor", "token_level_loss: true"),
        (
            ["grpo.adv_estimator.name=gdpo", "grpo.adv_estimator.normalization_scope=batch"],
            "grpo.adv_estimator.normalization_scope",
            "name: grpo only",
        ),
        (
            ["grpo.adv_estimator.normalization_scope=batch", "grpo.adv_estimator.use_leave_one_out_baseline=true"],
            "grpo.adv_estimator.normalization_scope",
            "allowed: group",
        ),
        (["rollout.min_group_size=3"], "rollout.min_group_size", "at most .* 2"),
        (["grpo.advantage_clip_low=1", "grpo.advantage_clip_high=-1"], "grpo.advantage_clip_low", "at most"),
        (
            ["grpo.reward_scaling.enabled=true", "grpo.reward_scaling.source_min=1"],
            "grpo.reward_scaling.source_min",
            "below source_max",
        ),
        (
            ["reward_penalties.penalize_unwanted_tokens=true"],
            "reward_penalties.token_ids.unwanted",
            "needed by penalize_unwanted_tokens",
        ),
        (
            ["reward_penalties.penalize_empty_final_answer=true", "grpo.adv_estimator.name=gdpo"],
            "reward_penalties.penalize_empty_final_answer",
            "gdpo reads",
        ),
        (["reward_penalties.thinking_tags=[a,a]"], "reward_penalties.thinking_tags", "opening and the closing"),
        (["policy.generation.temperature=0"], "policy.generation.temperature", "val_temperature"),
        (
            [*SINGLE, "grpo.adv_estimator.name=opd", "++teacher.model_name=m", "policy.generation.top_p=0.9"],
            "policy.generation.top_p",
            "whole distribution: 1.0",
        ),
        (
            [*SINGLE, "grpo.adv_estimator.name=opd", "++teacher.model_name=m", "policy.generation.top_k=50"],
            "policy.generation.top_k",
            "whole distribution: null",
        ),
        (["policy.generation.max_new_tokens=513"], "policy.generation.max_new_tokens", "at most .* 512"),
        (["policy.generation.vllm_cfg.max_model_len=511"], "policy.generation.vllm_cfg.max_model_len", "at least"),
        (["data.max_input_seq_length=513"], "data.max_input_seq_length", "at most"),
        (
            ["grpo.reward_shaping.enabled=true", "policy.generation.max_new_tokens=100"],
            "grpo.reward_shaping.overlong_buffer_length",
            "100 tokens",
        ),
        (
            ["policy.generation.backend=hf", "policy.generation.in_actor=true"],
            "policy.generation.in_actor",
            "backend: vllm",
        ),
        (
            ["policy.generation.backend=hf", "++policy.generation.vllm_kwargs.a=1"],
            "policy.generation.vllm_kwargs",
            "backend: vllm",
        ),
        (
            ["policy.device=cpu", "policy.dtensor_cfg.data_parallel_size=3"],
            "policy.train_global_batch_size",
            "multiple of the 3",
        ),
        (
            ["++policy.dtensor_cfg.backend=megatron"],
            "policy.dtensor_cfg.backend",
            "always that of fsdp2",
        ),
        (["policy.scheduler=[{name:a.B},{name:a.C}]"], "policy.scheduler", "2 schedulers .* 1 milestones"),
        (["policy.scheduler=[{name:a.B},{milestones:[5]}]"], "policy.scheduler", "1 schedulers .* 0 milestones"),
        (["policy.scheduler={kwargs:{a:1}}"], "policy.scheduler", "either a name"),
        (
            ["policy.scheduler=[{name:a.B},{name:a.C},{name:a.D},{milestones:[5,5]}]"],
            "policy.scheduler",
            "must increase",
        ),
    ],
)
def test_sizes_and_engine_that_do_not_fit_are_refused(load: Load, overrides: list[str], key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        load("", *overrides)
    assert error.value.key == key


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ([LOSS + "use_cispo=true", LOSS + "disable_ppo_ratio=true"], LOSS + "disable_ppo_ratio"),
        ([LOSS + "use_cispo=true", LOSS + "force_on_policy_ratio=true"], LOSS + "force_on_policy_ratio"),
        ([LOSS + "use_cispo=true", LOSS + "ratio_clip_c=3"], LOSS + "ratio_clip_c"),
        (
            [LOSS + "use_cispo=true", LOSS + "sequence_level_importance_ratios=true", LOSS + "token_level_loss=false"],
            LOSS + "sequence_level_importance_ratios",
        ),
        ([LOSS + "sequence_level_importance_ratios=true"], LOSS + "token_level_loss"),
        ([LOSS + "disable_ppo_ratio=true", LOSS + "ratio_clip_c=3"], LOSS + "ratio_clip_c"),
        ([LOSS + "ratio_clip_c=1"], LOSS + "ratio_clip_c"),
        ([LOSS + "force_on_policy_ratio=true", "policy.train_global_batch_size=4"], LOSS + "force_on_policy_ratio"),
        ([TIS + "type=tis", TIS + "ratio=2"], LOSS + "use_importance_sampling_correction"),
        ([TIS + "ratio=2"], LOSS + "use_importance_sampling_correction"),
        ([TIS + "type=icepop"], LOSS + "use_importance_sampling_correction"),
        ([CORRECTED, TIS + "type=tis"], TIS + "ratio"),
        ([CORRECTED, TIS + "ratio_min=0.5"], TIS + "ratio"),
        ([CORRECTED, TIS + "type=icepop"], TIS + "ratio"),
        (
            [
                *(CORRECTED, TIS + "type=seq-mask-tis", TIS + "ratio=2"),
                *(LOSS + "sequence_level_importance_ratios=true", LOSS + "token_level_loss=false"),
            ],
            TIS + "type",
        ),
        (["grpo.adv_estimator.name=gdpo", "grpo.reward_scaling.enabled=true"], "grpo.reward_scaling.enabled"),
        (["grpo.adv_estimator.name=gdpo", "grpo.reward_shaping.enabled=true"], "grpo.reward_shaping.enabled"),
        ([CORRECTED, TIS + "type=icepop", TIS + "ratio=2", TIS + "ratio_min=3"], TIS + "ratio_min"),
        (
            [LOSS + "use_kl_in_reward=true", "grpo.adv_estimator.name=reinforce_plus_plus"],
            LOSS + "reference_policy_kl_penalty",
        ),
        (["++grpo.adv_estimator.reward_weights.a=1"], "grpo.adv_estimator.reward_weights"),
        (["grpo.adv_estimator.minus_baseline=false"], "grpo.adv_estimator.minus_baseline"),
    ],
)
def test_losses_and_advantages_without_a_formula_are_refused(load: Load, overrides: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        load("", *overrides)
    assert error.value.key == key


@pytest.mark.parametrize(
    "overrides",
    [
        [*SINGLE, "grpo.adv_estimator.name=reinforce_plus_plus", "grpo.adv_estimator.minus_baseline=false"],
        [*SINGLE, "grpo.adv_estimator.name=opd", "++teacher.model_name=m"],
        [LOSS + "token_level_loss=false", LOSS + "trajectory_token_divisor=512"],
        [LOSS + "sequence_level_importance_ratios=true", LOSS + "token_level_loss=false"],
        [LOSS + "use_cispo=true"],
        [LOSS + "disable_ppo_ratio=true"],
        [LOSS + "force_on_policy_ratio=true"],
        ["grpo.reward_shaping={enabled:true,stop_properly_penalty_coef:0.5}", "policy.generation.max_new_tokens=100"],
        [CORRECTED],
        [CORRECTED, TIS + "ratio=2"],
        [CORRECTED, TIS + "type=tis", TIS + "ratio=2", TIS + "ratio_min=0.5"],
        [CORRECTED, TIS + "type=icepop", TIS + "ratio=2", TIS + "ratio_min=0.5"],
        [CORRECTED, TIS + "type=seq-mask-tis", TIS + "ratio=2"],
        ["grpo.adv_estimator.name=gdpo", "++grpo.adv_estimator.reward_weights.a=1"],
        ["grpo.adv_estimator.name=reinforce_plus_plus", "grpo.adv_estimator.minus_baseline=false"],
        ["policy.scheduler={name:a.B}"],
        ["policy.scheduler=[{name:a.B},{name:a.C},{milestones:[5]}]"],
        ["cluster.gpus_per_node=0"],
        [CHECKPOINTS, "checkpointing.metric_name=train:reward"],
        [CHECKPOINTS, "checkpointing.metric_name=train:advantages/mean"],
        [CHECKPOINTS, "checkpointing.metric_name=train:max_trajectory_age"],
        [CHECKPOINTS, "checkpointing.metric_name=train:num_skipped_steps"],
        [CHECKPOINTS, "checkpointing.metric_name=val:accuracy", VALIDATION],
        [CHECKPOINTS, "checkpointing.metric_name=val:gsm8k_2/accuracy", VALIDATIONS],
        [CHECKPOINTS, "checkpointing.metric_name=val:pass_4", VALIDATION, "grpo.val_num_generations_per_prompt=4"],
        ["checkpointing.metric_name=val:accuracy"],
        [CHECKPOINTS, "checkpointing.metric_name=val:accuracy"],  # nothing is validated: the newest are kept
    ],
)
def test_what_has_a_meaning_is_accepted(load: Load, overrides: list[str]) -> None:
    load("", *overrides)


@pytest.mark.parametrize(
    ("metric", "overrides", "said"),
    [
        ("val_reward", [VALIDATION], 'must be "val:" or "train:"'),
        ("val:", [VALIDATION], 'must be "val:" or "train:"'),
        ("val:acuracy", [VALIDATION], "did you mean accuracy"),
        ("val:pass_8", [VALIDATION], "no such metric"),
        ("train:rewards", [], r"did you mean reward\?"),
        ("train:forward_kl", [], "no such metric"),
        ("val:accuracy", [VALIDATION, NO_END, "grpo.val_period=0"], "grpo.val_period"),
        ("val:greedy_accuracy", [VALIDATION], "grpo.val_greedy: true"),
        ("val:gsm8k/greedy_accuracy", [VALIDATIONS], "grpo.val_greedy: true"),
        ("val:greedy_reward", [VALIDATION], "grpo.val_greedy: true"),
        ("val:accuracy", [VALIDATION, "grpo.val_correct_reward=null"], "write val:reward"),
        ("val:gsm8k/accuracy", [VALIDATION], 'gsm8k is the only validation dataset: write "val:accuracy"'),
        ("val:gsm8k/accurcy", [VALIDATIONS], r"did you mean accuracy\?"),
        ("val:math/accuracy", [VALIDATIONS], "no such validation dataset; .*: gsm8k, gsm8k_2"),
    ],
)
def test_metric_that_will_not_exist_is_refused(load: Load, metric: str, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        load("", CHECKPOINTS, f"checkpointing.metric_name={metric}", *overrides)
    assert error.value.key == "checkpointing.metric_name"
    assert error.value.value == metric


@pytest.mark.parametrize(
    ("train", "key", "said"),
    [
        ("{dataset_name: null}", "data.train.dataset_name", "required"),
        ("{dataset_name: jsonl}", "data.train.data_path", "required by dataset_name: jsonl"),
        ("{dataset_name: huggingface}", "data.train.data_path", "required"),
        ("{dataset_name: reasoning_gym}", "data.train.task", "required"),
        ("{dataset_name: jsonl, data_path: no/such.jsonl}", "data.train.data_path", "no such file"),
        ("[{dataset_name: gsm8k}, {dataset_name: jsonl, data_path: x}]", "data.train.1.data_path", "no such file"),
        ("{dataset_name: gsm8k, prompt_file: no/such.txt}", "data.train.prompt_file", "no such file"),
        ("{dataset_name: gsm8k, system_prompt_file: no/such.txt}", "data.train.system_prompt_file", "no such file"),
        ("{dataset_name: gsm8k, env_name: maths}", "data.train.env_name", r"did you mean math\?"),
        ("{dataset_name: jsonll}", "data.train.dataset_name", r"unknown dataset, .*did you mean jsonl\?"),
        ("{dataset_name: no_such_module.rows}", "data.train.dataset_name", "cannot be imported"),
        ("{dataset_name: gsm8k, processor: final_answr}", "data.train.processor", r"did you mean final_answer\?"),
        ("[]", "data.train", "must name a dataset"),
    ],
)
def test_data_that_is_not_there_is_refused(load: Load, train: str, key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        load(f"data:\n  _override_: true\n  train: {train}")
    assert error.value.key == key


def test_files_of_data_sets_that_exist_are_accepted(load: Load, tmp_path: Path) -> None:
    rows, prompt = tmp_path / "rows.jsonl", tmp_path / "prompt.txt"
    rows.write_text("{}\n")
    prompt.write_text("{}")
    load(
        f"""
        data:
          default: {{dataset_name: jsonl, env_name: math, prompt_file: {prompt}}}
          train: {{dataset_name: null, data_path: {rows}}}
        """
    )


def test_every_metric_of_rollouts_may_rank_checkpoints() -> None:
    trajectory = Trajectory(Prompt("p", "math", ()), "g", 0, (), StopReason.DONE, {"math": 1.0}, num_turns=1)
    names = {name for name in rollout_metrics([trajectory]) if "/" not in name}
    assert names <= ranking_metrics("train", "grpo")


def test_asynchronous_training_needs_the_off_policy_correction() -> None:
    config = make_config(grpo={"async_grpo": {"enabled": True}})
    with pytest.raises(ConfigError, match=r"loss_fn.use_importance_sampling_correction = False: .* must be true"):
        check_async(config)
    check_async(
        make_config(grpo={"async_grpo": {"enabled": True}}, loss_fn={"use_importance_sampling_correction": True})
    )
    check_async(make_config())


def policy(lora: dict[str, Any], **sections: Any) -> PolicyConfig:
    dtensor = {"lora_cfg": lora, **sections.pop("dtensor_cfg", {})}
    return PolicyConfig.model_validate({"model_name": "m", "dtensor_cfg": dtensor, **sections})


@pytest.mark.parametrize(
    ("lora", "sections", "said"),
    [
        ({}, {"megatron_cfg": {"enabled": True}}, "lora_cfg.enabled = True: policy.megatron_cfg.enabled is true"),
        (
            {},
            {"dtensor_cfg": {"tensor_parallel_size": 2, "sequence_parallel": True}},
            "sequence_parallel = True: policy.dtensor_cfg.lora_cfg.enabled is true",
        ),
        (
            {"match_all_linear": True, "target_modules": ["q_proj"]},
            {},
            r"target_modules = \['q_proj'\]: .*match_all_linear is true",
        ),
    ],
)
def test_what_adapters_cannot_be_combined_with_is_refused(
    lora: dict[str, Any], sections: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_backend(policy({"enabled": True, **lora}, **sections), key="policy")
    check_backend(policy({"enabled": False, **lora}, **sections), key="policy")


def test_adapters_of_some_or_of_all_layers_are_accepted() -> None:
    check_backend(policy({"enabled": True, "match_all_linear": True}), key="policy")
    check_backend(policy({"enabled": True, "target_modules": ["q_proj"], "exclude_modules": ["*.0.*"]}), key="policy")


BACKGROUND = """
grpo: {async_grpo: {enabled: true}}
loss_fn: {use_importance_sampling_correction: true}
"""
JUDGE_ON_THE_DEVICE = """
reward_model: {enable: true}
scorers: {judge: {type: reward_model, model_name: x}}
env: {math: {scorers: [judge]}}
"""
SAMPLED_TOGETHER = "policy: {generation: {backend: hf}}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BACKGROUND, "keeps what a step"),
        (JUDGE_ON_THE_DEVICE, "after the last"),
        (SAMPLED_TOGETHER, "samples all rollouts together"),
    ],
)
def test_an_early_stop_is_refused_where_it_stops_nothing(load: Load, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        load(text, "rollout.oversample=1.5")
    assert error.value.key == "rollout.oversample"


def test_validations_beside_training_are_refused_with_scorers_on_the_engines_device(load: Load) -> None:
    with pytest.raises(ConfigError, match="enable_resource_pool: true") as error:
        load(JUDGE_ON_THE_DEVICE, "grpo.val_overlap=true")
    assert error.value.key == "grpo.val_overlap"
    load(
        JUDGE_ON_THE_DEVICE,
        "grpo.val_overlap=true",
        "reward_model.enable_resource_pool=true",
        "reward_model.n_gpus_per_node=1",
        "reward_model.nnodes=1",
    )
