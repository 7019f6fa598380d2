import logging
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.config.compatibility import RULES
from nemo_rl.config.keys import find_schema_node
from nemo_rl.errors import ConfigError
from tests.unit.config.conftest import Load

# What NeMo-RL's base recipe says beyond our schema, in the values with which it asks for nothing that we lack.
NEMO_RL = """
grpo:
  normalize_rewards: true
  use_leave_one_out_baseline: true
  skip_reference_policy_logprobs_calculation: false
  async_grpo:
    enabled: false
    max_trajectory_age_steps: 1
    in_flight_weight_updates: false
    recompute_kv_cache_after_weight_updates: false
loss_fn:
  truncated_importance_sampling_type: tis
  truncated_importance_sampling_ratio: null
checkpointing: {model_save_format: safetensors, save_consolidated: false}
policy:
  tokenizer: {name: "${policy.model_name}", chat_template: default, chat_template_kwargs: null}
  hf_config_overrides: {}
  generation_batch_size: 32
  offload_optimizer_for_logprob: false
  dtensor_cfg:
    _v2: true
    enabled: true
    sequence_parallel: false
    tensor_parallel_size: 1
    context_parallel_size: 1
    custom_parallel_plan: null
    lora_cfg:
      {enabled: true, dim: 8, alpha: 32, target_modules: [], exclude_modules: null, match_all_linear: true,
       dropout: 0.0, dropout_position: post, lora_A_init: xavier, use_triton: false}
  megatron_cfg:
    enabled: false
    optimizer: {lr: 1.0e-6, clip_grad: "${policy.max_grad_norm}"}
  max_grad_norm: 1.0
  dynamic_batching:
    enabled: false
    train_mb_tokens: ${mul:${policy.train_global_batch_size}, ${policy.train_micro_batch_size}}
  sequence_packing: {enabled: false, algorithm: modified_first_fit_decreasing}
  make_sequence_length_divisible_by: ${policy.dtensor_cfg.tensor_parallel_size}
  generation:
    top_k: null
    model_name: ${policy.model_name}
    mcore_generation_config: {buffer_size_gb: 20}
    vllm_cfg:
      async_engine: false
      kv_cache_dtype: auto
      pipeline_parallel_size: 1
      expert_parallel_size: 1
      use_deep_gemm: false
      num_last_layers_in_bf16: 0
      num_first_layers_in_bf16: 0
      enable_vllm_metrics_logger: true
      vllm_metrics_logger_interval: 0.5
    vllm_kwargs: null
    colocated: {enabled: true, resources: {gpus_per_node: null, num_nodes: null}}
data:
  num_workers: 1
  use_multiple_dataloader: false
  validation: null
  default: {processor: math_hf_data_processor, env_name: math}
env:
  math: {num_workers: 8, math_verify_impl: hf_math_verify}
logger:
  mlflow_enabled: false
  swanlab_enabled: false
  monitor_gpus: true
  swanlab: {project: p}
  tensorboard: {}
  mlflow: {experiment_name: e}
  gpu_monitoring: {collection_interval: 10}
cluster: {master_port_range_low: 25000}
"""


def test_nemo_rls_base_recipe_is_accepted_without_a_note(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        config: Any = load(NEMO_RL)
    assert caplog.messages == []
    assert config.grpo.adv_estimator.use_leave_one_out_baseline
    assert config.policy.tokenizer.chat_template is None


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "policy.dtensor_cfg.context_parallel_size=2",
            "context_parallel_size = 2: not available: .* only 1 is accepted",
        ),
        ("policy.dtensor_cfg.enabled=false", "it is the training backend; only true is accepted"),
        ("policy.dtensor_cfg.lora_cfg.dropout=0.1", "dropout is off"),
        ("policy.generation.vllm_cfg.kv_cache_dtype=fp8", "only 'auto' is accepted"),
        ("data.train.split_validation_size=0.05", "data.validation"),
        ("env.math.math_verify_impl=dapo_math_verify", "env.math.math_verify_impl = 'dapo_math_verify'"),
        ("logger.mlflow_enabled=true", "metrics.jsonl"),
        ("checkpointing.model_save_format=torch_save", "safetensors"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_reason(load: Load, override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load("", override)


def test_what_is_not_needed_is_noted_once(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        load("policy: {generation_batch_size: 64, make_sequence_length_divisible_by: 8}")
    assert caplog.messages == [
        "policy.generation_batch_size = 64 has no effect: the hf engine batches the requests that it receives"
    ]


def test_rules_enter_lists(load: Load) -> None:
    config = load(
        """
        data:
          train:
          - {dataset_name: gsm8k, processor: math_hf_data_processor}
          - {dataset_name: gsm8k, processor: json.loads, split_validation_size: 0}
        """
    )
    assert isinstance(config.data.train, list)
    assert [one.processor for one in config.data.train] == [None, "json.loads"]


def test_response_dataset_is_read_by_its_path(load: Load, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("{}\n")
    config = load(
        f"""
        data:
          default: {{dataset_name: ResponseDataset, input_key: question}}
          train: {{dataset_name: null, data_path: {path}}}
          validation: [{{data_path: org/name}}, {{dataset_name: gsm8k}}]
        """
    )
    assert not isinstance(config.data.train, list)
    assert config.data.train.dataset_name == "jsonl"
    assert isinstance(config.data.validation, list)
    assert [one.dataset_name for one in config.data.validation] == ["huggingface", "gsm8k"]
    assert config.data.default.dataset_name is None


def test_a_recipe_of_nemo_rl_for_nemo_gym_loads(load: Load, tmp_path: Path) -> None:
    for name in ("train", "validation"):
        (tmp_path / f"{name}.jsonl").touch()
    config = load(
        f"""
        data:
          default: {{dataset_name: NemoGymDataset, processor: nemo_gym_data_processor, env_name: nemo_gym}}
          train: {{dataset_name: null, data_path: {tmp_path}/train.jsonl}}
          validation: [{{dataset_name: NemoGymDataset, data_path: {tmp_path}/validation.jsonl, repeat: 4}}]
        env:
          should_use_nemo_gym: true
          should_log_nemo_gym_responses: true
          should_mask_flagged_samples: true
          nemo_gym: {{head_url: "http://127.0.0.1:11000"}}
        grpo: {{invalid_tool_call_advantage: -5.0, malformed_thinking_advantage: -5.0}}
        reward_penalties:
          penalize_unwanted_tokens: true
          penalize_malformed_think_tag: true
          token_ids: {{unwanted: [2], think_open: null, think_close: null}}
        """
    )
    assert config.data.default.dataset_name == "nemo_gym"
    assert config.data.default.processor is None
    assert isinstance(config.data.validation, list)
    assert (config.data.validation[0].dataset_name, config.data.validation[0].repeat) == ("nemo_gym", 4)
    assert set(config.env) == {"math", "nemo_gym"}
    assert config.reward_penalties.enabled == ("penalize_unwanted_tokens", "penalize_malformed_think_tag")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("env: {should_mask_flagged_samples: false}", "mask_sample of NeMo Gym's replies is honoured"),
        ("data: {train_jsonl_fpath: rows.jsonl}", "write data.train.data_path, with dataset_name: nemo_gym"),
        ("data: {agent_name: mcqa}", "write data.default.agent_name"),
    ],
)
def test_older_keys_of_nemo_gym_say_what_to_write(load: Load, line: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(line)


@pytest.mark.parametrize("flat", ["normalize_rewards", "use_leave_one_out_baseline"])
def test_flat_advantage_key_wins_over_a_lower_layer_and_loses_within_its_own(load: Load, flat: str) -> None:
    below = f"grpo: {{adv_estimator: {{{flat}: true}}}}"
    assert getattr(load(below, f"grpo.{flat}=false").grpo.adv_estimator, flat) is False
    both = f"grpo: {{{flat}: true, adv_estimator: {{{flat}: false}}}}"
    assert getattr(load(both).grpo.adv_estimator, flat) is False


@pytest.mark.parametrize(
    ("switch", "overrides", "loss_type"),
    [
        ("use_cispo", (), "cispo"),
        ("disable_ppo_ratio", (), "reinforce"),
        ("sequence_level_importance_ratios", ("loss_fn.token_level_loss=false",), "gspo"),
    ],
)
def test_a_switch_of_nemo_rls_losses_names_the_loss(
    load: Load, switch: str, overrides: tuple[str, ...], loss_type: str
) -> None:
    named = load("", f"loss_fn.type={loss_type}", *overrides).loss_fn
    assert load("", f"loss_fn.{switch}=true", *overrides).loss_fn == named
    assert load(f"loss_fn: {{{switch}: true}}", *overrides).loss_fn == named
    assert load(f"loss_fn: {{type: {loss_type}, {switch}: true}}", *overrides).loss_fn == named
    assert load(f"loss_fn: {{{switch}: false}}").loss_fn == load().loss_fn
    assert load().loss_fn.type == "ppo"


@pytest.mark.parametrize(
    ("line", "override", "key", "said"),
    [
        ("{use_cispo: true}", "disable_ppo_ratio=true", "disable_ppo_ratio", "no meaning with loss_fn.use_cispo"),
        ("{use_cispo: true}", "ratio_clip_c=3", "ratio_clip_c", "no meaning with loss_fn.use_cispo; allowed: null"),
        ("{type: cispo}", "ratio_clip_c=3", "ratio_clip_c", "no meaning with loss_fn.type: cispo; allowed: null"),
        ("{type: cispo}", "use_cispo=false", "use_cispo", "contradicts loss_fn.type: cispo"),
        ("{type: cispo}", "disable_ppo_ratio=true", "disable_ppo_ratio", "contradicts loss_fn.type: cispo"),
        ("{}", "sequence_level_importance_ratios=true", "token_level_loss", "needs false: one ratio a sequence"),
        ("{token_level_loss: true}", "type=gspo", "token_level_loss", "one ratio a sequence; allowed: false"),
        ("{}", "use_cispo=3", "use_cispo", "must be true or false"),
    ],
)
def test_contradicting_switches_are_refused(load: Load, line: str, override: str, key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        load(f"loss_fn: {line}", f"loss_fn.{override}")
    assert error.value.key == f"loss_fn.{key}"


def test_rules_for_values_we_refuse_name_keys_that_the_schema_does_not_have() -> None:
    examples = {"env.*": "env.math", "data.*": "data.train", "teachers.*": "teachers.math"}
    for rule in RULES:
        key = rule.key
        for pattern, example in examples.items():
            key = key.replace(pattern, example)
        section, _, name = key.rpartition(".")
        place = find_schema_node(section.split("."), {})
        is_ours = place is not None and name in place.names
        assert rule.otherwise == "keep" or not is_ours or key.endswith("dtensor_cfg.enabled"), rule.key
