import logging

import pytest

from nemo_rl.errors import ConfigError
from nemo_rl.policy.megatron.backend import TrainedMegatronConfig
from tests.unit.config.conftest import Load

# What NeMo-RL's recipes for Megatron say.
NEMO_RL = """
policy:
  precision: bfloat16
  max_grad_norm: 0.5
  optimizer: null
  scheduler: null
  dtensor_cfg: {enabled: false}
  megatron_cfg:
    enabled: true
    empty_unused_memory_level: 0
    activation_checkpointing: true
    converter_type: Qwen2ForCausalLM
    force_reconvert_from_hf: false
    tensor_model_parallel_size: 2
    expert_tensor_parallel_size: 1
    expert_model_parallel_size: 1
    pipeline_model_parallel_size: 2
    num_layers_in_first_pipeline_stage: null
    num_layers_in_last_pipeline_stage: null
    context_parallel_size: 1
    pipeline_dtype: ${policy.precision}
    sequence_parallel: false
    freeze_moe_router: true
    moe_router_dtype: fp64
    moe_router_load_balancing_type: none
    moe_router_bias_update_rate: 0.0
    moe_permute_fusion: false
    apply_rope_fusion: true
    bias_activation_fusion: true
    defer_fp32_logits: false
    moe_per_layer_logging: false
    peft: {enabled: false, dim: 8}
    optimizer:
      optimizer: adam
      lr: 5.0e-6
      min_lr: 5.0e-7
      weight_decay: 0.01
      bf16: true
      fp16: false
      params_dtype: float32
      adam_beta1: 0.9
      adam_beta2: 0.999
      adam_eps: 1.0e-8
      sgd_momentum: 0.9
      use_distributed_optimizer: true
      use_precision_aware_optimizer: true
      optimizer_cpu_offload: false
      optimizer_offload_fraction: 0.0
      clip_grad: ${policy.max_grad_norm}
    scheduler:
      start_weight_decay: ${policy.megatron_cfg.optimizer.weight_decay}
      end_weight_decay: ${policy.megatron_cfg.optimizer.weight_decay}
      weight_decay_incr_style: constant
      lr_decay_style: constant
      lr_decay_iters: 1000
      lr_warmup_iters: 13
      lr_warmup_init: 5.0e-7
    distributed_data_parallel_config:
      grad_reduce_in_fp32: false
      overlap_grad_reduce: true
      overlap_param_gather: true
      use_custom_fsdp: false
      data_parallel_sharding_strategy: optim_grads_params
    fp8_cfg: {enabled: false, fp8: e4m3}
    env_vars: null
"""


def test_nemo_rls_megatron_section_is_accepted_with_its_differences_noted(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        policy = load(NEMO_RL).policy
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("read as a recipe of NeMo-RL 0.6; where it is silent its defaults hold: ")
    section = policy.section_of(TrainedMegatronConfig)
    assert policy.model_parallel_size == 4
    assert section.pipeline_dtype == "bfloat16"
    assert section.optimizer is not None
    assert section.optimizer.min_lr == 5e-7
    assert section.reduction_on("cuda", 2).divides_optimizer
    assert section.scheduler is not None
    assert section.scheduler.lr_warmup_iters == 13
    assert section.distributed_data_parallel_config.overlap_grad_reduce


def test_ranks_that_share_sequences_are_read_from_nemo_rls_recipes(load: Load) -> None:
    policy = load(NEMO_RL, "policy.megatron_cfg.context_parallel_size=2").policy
    assert (policy.context_parallel_size, policy.model_parallel_size) == (2, 8)
    assert not policy.parallelism.splits_residual
    assert load(NEMO_RL, "policy.megatron_cfg.sequence_parallel=true").policy.parallelism.splits_residual
    sizes = ("enabled=true", "context_parallel_size=2", "tensor_parallel_size=2", "sequence_parallel=true")
    policy = load(
        NEMO_RL, "policy.megatron_cfg.enabled=false", *(f"++policy.dtensor_cfg.{size}" for size in sizes)
    ).policy
    assert (policy.context_parallel_size, policy.model_parallel_size) == (2, 4)
    assert policy.parallelism.splits_residual


def test_a_layout_that_does_not_change_results_is_noted(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    load(NEMO_RL, "policy.megatron_cfg.fine_grained_activation_offloading=true")
    assert caplog.messages[-1].startswith(
        "switches of speed, memory or layout without effect here: "
        "policy.megatron_cfg.fine_grained_activation_offloading = true ("
    )


def test_adapters_have_nemo_rls_keys_and_megatrons_names_of_layers(load: Load) -> None:
    peft = """{enabled: true, target_modules: [linear_qkv, "*.layers.0.*.linear_fc2", up_proj], exclude_modules: [],
      dim: 4, alpha: 8, dropout: 0.0, dropout_position: post, lora_A_init_method: kaiming, lora_B_init_method: zero,
      a2a_experimental: false, lora_dtype: None}"""
    parallelism = load(NEMO_RL.replace("{enabled: false, dim: 8}", peft)).policy.parallelism
    assert isinstance(parallelism, TrainedMegatronConfig)
    own = parallelism.peft.in_model_names()
    assert own.target_modules == ["q_proj", "k_proj", "v_proj", "*.layers.0.*.down_proj", "up_proj"]
    assert (parallelism.adapter_dim, own.alpha, own.lora_A_init) == (4, 8, "kaiming")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("peft.dropout=0.1", r"peft\.dropout = 0\.1: not available: dropout is off"),
        ("peft.lora_B_init_method=normal", r"lora_B_init_method = 'normal': not available: B is initially 0"),
        ("fp8_cfg.enabled=true", r"fp8_cfg\.enabled = True"),
        ("optimizer.fp16=true", r"optimizer\.fp16 = True"),
        ("optimizer.optimizer=muon", r"optimizer\.optimizer = 'muon'"),
        ("scheduler.weight_decay_incr_style=linear", "only 'constant' is accepted"),
        ("distributed_data_parallel_config.use_custom_fsdp=true", "use_custom_fsdp = True"),
    ],
)
def test_what_megatron_cannot_do_is_refused_with_its_key(load: Load, override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        load(NEMO_RL, f"policy.megatron_cfg.{override}")
    assert refused.value.key.startswith("policy.megatron_cfg.")


def test_adapters_refuse_biases_of_routers_that_move(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"policy\.moe\.bias_update_rate = 0\.001: adapters are trained"):
        load("policy: {megatron_cfg: {enabled: true, peft: {enabled: true}}, moe: {bias_update_rate: 1.0e-3}}")


def test_unknown_key_is_refused_where_megatron_is_on(load: Load) -> None:
    section = "policy: {megatron_cfg: {enabled: %s, tensor_parallel_size: 2}}"
    assert not load(section % "false").policy.megatron_cfg.enabled
    with pytest.raises(ConfigError, match=r"tensor_parallel_size = 2: .*tensor_model_parallel_size"):
        load(section % "true")


def test_megatron_takes_the_place_of_fsdp2(load: Load) -> None:
    both = "policy: {megatron_cfg: {enabled: true}, dtensor_cfg: {enabled: true, data_parallel_size: 3}}"
    assert load(both).policy.data_parallel_size is None
    assert (
        load(
            "policy: {dtensor_cfg: {data_parallel_size: 3}, train_global_batch_size: 12}", "grpo.num_prompts_per_step=6"
        ).policy.data_parallel_size
        == 3
    )
