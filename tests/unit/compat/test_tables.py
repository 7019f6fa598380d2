import logging
import re
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.compat.tables import find_cause, load_rules, load_table
from nemo_rl.config.keys import find_schema_node
from nemo_rl.config.loading import load_config, resolved_yaml
from nemo_rl.errors import CombinedConfigError, ConfigError
from nemo_rl.recipes import find_recipe
from tests.support.metric_names import find_undocumented
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


def test_nemo_rls_base_recipe_is_accepted_with_one_note_on_its_defaults(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        config: Any = load(NEMO_RL)
    assert caplog.messages == [
        "read as a recipe of NeMo-RL 0.7; where it is silent its defaults hold: grpo.val_at_end = false, "
        "grpo.async_grpo.max_generation_failures = 0, loss_fn.reference_policy_kl_penalty = 0.01, "
        "grpo.adv_estimator.min_std_share = 0.0, data.overlong = 'mask', data.disjoint = false",
    ]
    assert config.grpo.adv_estimator.use_leave_one_out_baseline
    assert config.policy.tokenizer.chat_template is None


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "policy.generation.vllm_cfg.pipeline_parallel_size=2",
            "pipeline_parallel_size = 2: not available: .* only 1 is accepted",
        ),
        ("policy.dtensor_cfg.enabled=false", "it is the training backend .*; only true is accepted"),
        ("policy.dtensor_cfg.lora_cfg.dropout=0.1", "dropout is off"),
        ("policy.generation.vllm_cfg.kv_cache_dtype=fp8", "only 'auto' is accepted"),
        ("env.math.math_verify_impl=sympy", "env.math.math_verify_impl = 'sympy'"),
        ("+policy.generation.vllm_cfg.pipeline_parallel_size=true", "pipeline_parallel_size = True: not available"),
        ("+policy.dtensor_cfg.enabled=1", "dtensor_cfg.enabled = 1: not available"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_reason(load: Load, override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load("", override)


def test_switches_are_noted_together(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    load("policy: {generation_batch_size: 64, offload_optimizer_for_logprob: true}")
    assert caplog.messages == [
        "switches of speed, memory or layout without effect here: policy.generation_batch_size = 64 (the engine "
        "batches the requests that it receives); policy.offload_optimizer_for_logprob = true (memory is managed by the "
        "placement plan)"
    ]


def test_an_interpolation_of_a_moved_key_is_resolved(load: Load) -> None:
    text = """
    grpo:
      normalize_rewards: false
      adv_estimator: {name: grpo, normalize_rewards: "${grpo.normalize_rewards}"}
    """
    assert not load(text).grpo.adv_estimator.normalize_rewards  # type: ignore[attr-defined]
    assert load(text, "grpo.normalize_rewards=true").grpo.adv_estimator.normalize_rewards  # type: ignore[attr-defined]


def test_the_backend_that_is_off_is_not_judged(load: Load) -> None:
    off = "{enabled: false, custom_parallel_plan: plan, expert_parallel_size: 8, no_such_key: 1}"
    config = load(f"policy: {{dtensor_cfg: {off}, megatron_cfg: {{enabled: true}}}}")
    assert config.policy.backend_key == "megatron_cfg"
    with pytest.raises(ConfigError, match=r"or Megatron's own adapters \(policy\.megatron_cfg\.peft\)"):
        load("policy: {dtensor_cfg: {lora_cfg: {enabled: true}}, megatron_cfg: {enabled: true}}")


def test_all_problems_are_told_at_once_grouped_by_cause(load: Load) -> None:
    with pytest.raises(CombinedConfigError) as refused:
        load(
            "policy: {megatron_cfg: {enabled: true, peft: {enabled: true, dropout: 0.1}, fp8_cfg: {enabled: true}}}",
            "grpo.val_perod=3",
            "policy.generation.temperature=0",
        )
    assert [error.key for error in refused.value.errors] == [
        "policy.megatron_cfg.peft.dropout",
        "policy.megatron_cfg.fp8_cfg.enabled",
        "grpo.val_perod",
        "policy.generation.temperature",
    ]
    lines = str(refused.value).splitlines()
    assert lines[0] == "4 problems:"
    assert len(lines) == 5


def test_layout_is_left_out_on_request_and_results_never_are(load: Load, recipe: Path) -> None:
    path = recipe.parent / "recipe.yaml"
    path.write_text(
        "defaults: base.yaml\n"
        "policy:\n"
        "  generation_batch_size: 32\n"
        "  generation: {backend: sglang, vllm_cfg: {precision: fp8, load_format: auto}}\n"
        "  dtensor_cfg: {custom_parallel_plan: my.plan}\n"
    )
    config = load_config(path, allow_unsupported=True)
    assert config.policy.generation.backend == "vllm"
    with pytest.raises(ConfigError, match="3 problems"):
        load_config(path)
    with pytest.raises(ConfigError, match=r"lora_cfg\.dropout"):
        load_config(path, ["++policy.dtensor_cfg.lora_cfg.dropout=0.1"], allow_unsupported=True)


def test_megatrons_own_bound_of_the_gradient_counts(load: Load) -> None:
    text = "policy: {max_grad_norm: 1.0, megatron_cfg: {enabled: true, optimizer: {lr: 1.0e-6, clip_grad: %s}}}"
    assert load(text % "0").policy.max_grad_norm is None
    assert load(text % "0.5").policy.max_grad_norm == 0.5


def test_the_flat_data_section_names_train_and_validation(load: Load) -> None:
    config = load(
        """
        data:
          _override_: true
          dataset_name: DeepScaler
          prompt_file: null
          env_name: math
          max_input_seq_length: 256
        """
    )
    assert not isinstance(config.data.train, list)
    assert not isinstance(config.data.validation, list)
    assert config.data.validation is not None
    assert (config.data.train.dataset_name, config.data.validation.dataset_name) == ("DeepScaleR", "AIME2024")
    assert config.data.default.env_name == "math"


def test_validation_sampling_moves_to_the_algorithm(load: Load) -> None:
    values = "{temperature: 1.0, top_p: 1.0, val_temperature: 0.6, val_top_p: 0.95, val_top_k: null}"
    grpo = load(f"policy: {{generation: {values}}}").grpo
    assert (grpo.val_temperature, grpo.val_top_p, grpo.val_top_k) == (0.6, 0.95, None)
    same = load("policy: {generation: {temperature: 0.8, val_temperature: 0.8, val_top_p: 1.0}}").grpo
    assert same.val_temperature is None


def test_env_vars_of_workers_are_those_of_the_run(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    config = load("policy: {dtensor_cfg: {env_vars: {NCCL_ALGO: Ring, NRL_REFIT_NUM_BUFFERS: '1'}}}")
    assert config.cluster.env_vars == {"NCCL_ALGO": "Ring"}
    assert "NRL_REFIT_NUM_BUFFERS" in caplog.text


def test_the_engines_parsers_become_the_gateways(load: Load) -> None:
    served = "policy: {generation: {vllm_cfg: {expose_http_server: true, http_server_serving_chat_kwargs: %s}}}"
    config = load(served % "{enable_auto_tools: true, tool_parser: hermes, reasoning_parser: deepseek_r1}")
    assert (config.gateway.tool_parser, config.gateway.reasoning_parser) == ("hermes", "think")
    assert load(served % "{tool_parser: pythonic}").gateway.tool_parser == "pythonic"  # vLLM's, by its name


def test_verifiers_have_kinds(load: Load) -> None:
    config: Any = load("env: {math: {math_verify_impl: dapo_math_verify}}")
    assert config.env["math"].verifier == "last_answer"
    config = load("env: {math: {verifier_type: english_multichoice}}")
    assert config.env["math"].verifier == "choice"


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
        checkpointing: {{enabled: true, metric_name: "val:total_reward/mean"}}
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
    assert config.checkpointing.metric_name == "val:reward"
    assert config.reward_penalties.enabled == ("penalize_unwanted_tokens", "penalize_malformed_think_tag")


def test_flags_of_nemo_gym_are_always_honoured(load: Load) -> None:
    with pytest.raises(ConfigError, match="mask_sample of NeMo Gym's replies is always honoured"):
        load("env: {should_mask_flagged_samples: false}")


def test_older_keys_of_nemo_gyms_data_are_renamed(load: Load, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    config = load(
        f"data: {{_override_: true, default: {{dataset_name: NemoGymDataset, env_name: nemo_gym}}, agent_name: mcqa, "
        f"train_jsonl_fpath: {tmp_path}/rows.jsonl}}",
        "++env.nemo_gym.head_url=http://127.0.0.1:11000",
    )
    assert not isinstance(config.data.train, list)
    assert config.data.train.data_path == f"{tmp_path}/rows.jsonl"
    assert config.data.default.agent_name == "mcqa"


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
        ("{token_level_loss: true}", "type=gspo", "token_level_loss", "one ratio per sequence; allowed: false"),
        ("{}", "use_cispo=3", "use_cispo", "must be true or false"),
    ],
)
def test_contradicting_switches_are_refused(load: Load, line: str, override: str, key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        load(f"loss_fn: {line}", f"loss_fn.{override}")
    assert error.value.key == f"loss_fn.{key}"


def test_rows_of_the_table_are_sound() -> None:
    examples = {"env.*": "env.math", "data.*": "data.train", "teachers.*": "teachers.math"}
    causes = set()
    for rule in load_rules():
        key = rule.key
        for pattern, example in examples.items():
            key = key.replace(pattern, example)
        section, _, name = key.rpartition(".")
        place = find_schema_node(section.split(".") if section else [], {})
        is_ours = place is not None and name in place.names
        assert rule.action == "default" or not is_ours or key.endswith(("dtensor_cfg.enabled", "scheduler")), rule.key
        assert (rule.cause is not None) == (rule.action in ("note", "refuse")), rule.key
        causes.add(rule.cause)
    assert {find_cause(name) for name in load_table("causes")["causes"]} <= causes | {find_cause("ppo")}


def test_metrics_with_another_name_stand_with_one_that_exists() -> None:
    named = " ".join(load_table("releases")["metric_names"].values())
    ours = re.findall(r"`((?:train|validation|timing)/[a-z_/]+)`", named)
    assert len(ours) > 5
    assert find_undocumented(ours) == []


@pytest.mark.parametrize("name", ["mmlu_EN-US", "rows.csv"])
def test_a_resolved_configuration_with_a_dataset_of_nemo_rls_names_is_read_again(name: str, tmp_path: Path) -> None:
    first = load_config(find_recipe("quickstart"), [f"data.train={{dataset_name: {name}}}"])
    again = tmp_path / "again.yaml"
    again.write_text(resolved_yaml(first))
    assert load_config(again, []) == first


@pytest.mark.parametrize(
    ("telemetry", "is_traced", "noted"),
    [
        ("{enabled: true, service_name: nemo-rl, span_groups: default, export_rank: -1}", True, ""),
        ("{enabled: false, traces_enabled: true}", False, ""),
        ("{enabled: true, span_groups: per_step}", True, "telemetry.span_groups = 'per_step' (all spans go to trace"),
        ("{enabled: true, vllm_native_tracing: true}", True, "telemetry.vllm_native_tracing = true (all spans go"),
    ],
)
def test_telemetry_is_the_trace(
    load: Load, caplog: pytest.LogCaptureFixture, telemetry: str, is_traced: bool, noted: str
) -> None:
    with caplog.at_level(logging.INFO):
        config: Any = load(NEMO_RL + f"telemetry: {telemetry}\n")
    assert config.logger.trace.enabled is is_traced
    assert noted in caplog.text
    assert ("telemetry" in caplog.text) == bool(noted)
