"""Sections of teachers: what is refused before anything loads, NeMo-RL's keys, and where teachers stand."""

import logging
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from nemo_rl.config.layout import DeviceSlot, Layout
from nemo_rl.config.layout_planner import make_layout
from nemo_rl.config.loading import load_config, load_distillation_config
from nemo_rl.config.master import DistillationRunConfig
from nemo_rl.errors import ConfigError

SMALLEST = """
distillation: {num_prompts_per_step: 8}
teacher: {model_name: t}
policy: {model_name: m, train_global_batch_size: 8, train_micro_batch_size: 4}
data: {train: {dataset_name: gsm8k}}
env: {math: {}}
"""

LoadDistillation = Callable[..., DistillationRunConfig]


@pytest.fixture
def load(tmp_path: Path) -> LoadDistillation:
    """`load(text, *overrides)`: a recipe of that text over the smallest one."""
    (tmp_path / "base.yaml").write_text(SMALLEST)

    def write_and_load(text: str = "", *overrides: str) -> DistillationRunConfig:
        path = tmp_path / "recipe.yaml"
        path.write_text("defaults: base.yaml\n" + dedent(text))
        return load_distillation_config(path, overrides)

    return write_and_load


def test_groups_of_one_are_trained_on(load: LoadDistillation) -> None:
    config = load("rollout: {min_group_size: 4}")
    assert config.algorithm.num_generations_per_prompt == 1
    assert config.min_group_size == 1


@pytest.mark.parametrize("metric", ["forward_kl", "reverse_kl", "teacher_topk_mass", "divergence", "unmatched", "loss"])
def test_metrics_of_distillation_may_rank_checkpoints(load: LoadDistillation, metric: str) -> None:
    load("", "++checkpointing.enabled=true", f"++checkpointing.metric_name=train:{metric}")


def test_a_tasks_own_teacher_comes_before_the_one_of_all(load: LoadDistillation) -> None:
    config = load("teachers: {math: {model_name: own}}")
    assert (config.teacher_key("math"), config.teacher_key("code")) == ("teachers.math", "teacher")
    assert load("", "~teacher", "++teachers={math: {model_name: own}}").teacher_key("code") is None


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("~teacher",), "teacher = None: required"),
        (("++teachers.maths={model_name: t}",), r"teachers\.maths = .*no such task; those of env: math; did you mean"),
        (
            ("policy.generation.temperature=0.8", "++teacher.server={base_urls: ['http://h'], model: s}"),
            r"teacher\.server = 's': a server answers for temperature 1",
        ),
        (("distillation.off_policy=true", "distillation.num_generations_per_prompt=2"), "one response for each prompt"),
        (
            ("distillation.off_policy=true", "distillation.async_rollouts.enabled=true"),
            r"distillation\.async_rollouts\.enabled = True: nothing is sampled",
        ),
        (
            ("teacher.dtensor_cfg.enabled=false",),
            r"teacher\.dtensor_cfg\.enabled = False: .*where policy\.megatron_cfg\.enabled is false",
        ),
        (
            ("++teacher.megatron_cfg={enabled: true, backend: fsdp2}",),
            r"teacher\.megatron_cfg\.backend = 'fsdp2': .* always that of megatron",
        ),
        (
            ("++teachers.math={model_name: t, dtensor_cfg: {tensor_parallel_size: none}}",),
            r"teachers\.math\.dtensor_cfg\.tensor_parallel_size = 'none'",
        ),
        (
            ("++teachers.math={model_name: t, dtensor_cfg: {backend: megatron}}",),
            r"teachers\.math\.dtensor_cfg\.backend",
        ),
        (
            ("++teachers.math={model_name: t, dtensor_cfg: {context_parallel_size: auto}}",),
            r"teachers\.math\.dtensor_cfg\.context_parallel_size = 'auto': a teacher scores .*; allowed: a number",
        ),
        (("++teacher.dtensor_cfg.custom_parallel_plan=x",), r"teacher\.dtensor_cfg\.custom_parallel_plan = "),
        (("teacher.modelname=x",), r"did you mean teacher\.model_name"),
    ],
)
def test_what_cannot_run_is_refused_with_its_key(load: LoadDistillation, overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load("", *overrides)


def test_a_whole_policy_section_of_nemo_rl_is_a_teacher(
    load: LoadDistillation, caplog: pytest.LogCaptureFixture
) -> None:
    whole = """
    teacher: &whole
      model_name: t
      tokenizer: {name: t, chat_template: default, chat_template_kwargs: null}
      train_global_batch_size: 64
      train_micro_batch_size: 1
      generation_batch_size: 64
      logprob_batch_size: 2
      logprob_chunk_size: null
      max_total_sequence_length: 8192
      precision: bfloat16
      offload_optimizer_for_logprob: false
      dtensor_cfg: {enabled: true, _v2: true, model_save_format: safetensors, tensor_parallel_size: 4,
                    context_parallel_size: 1, sequence_parallel: false, custom_parallel_plan: null}
      megatron_cfg: {enabled: false, optimizer: {lr: 1.0}}
      dynamic_batching: {enabled: true, train_mb_tokens: 8192, logprob_mb_tokens: 8192}
      sequence_packing: {enabled: false}
      max_grad_norm: 1.0
      make_sequence_length_divisible_by: 4
      optimizer: {name: torch.optim.AdamW, kwargs: {lr: 1.0}}
      scheduler: [{milestones: [10]}]
      generation: {backend: vllm, vllm_cfg: {anything: 1}}
    teachers: {math: *whole}
    """
    with caplog.at_level(logging.INFO):
        config = load(whole)
    assert caplog.messages[0].startswith("read as a recipe of NeMo-RL ")
    assert config.teacher is not None
    assert config.teacher.tensor_parallel_size == 4
    assert config.teachers["math"] == config.teacher


def test_a_whole_policy_section_on_megatron_is_a_teacher_on_megatron(
    load: LoadDistillation, caplog: pytest.LogCaptureFixture
) -> None:
    whole = """
    teacher: &whole
      model_name: t
      dtensor_cfg: {enabled: false, tensor_parallel_size: 8}
      megatron_cfg:
        enabled: true
        tensor_model_parallel_size: 2
        pipeline_model_parallel_size: 2
        context_parallel_size: 1
        activation_checkpointing: true
        peft: {enabled: false}
        optimizer: {optimizer: adam, lr: 1.0, use_distributed_optimizer: true}
        scheduler: {lr_decay_style: constant}
        distributed_data_parallel_config: {overlap_param_gather: true}
    teachers: {math: *whole}
    """
    with caplog.at_level(logging.INFO):
        config = load(whole)
    assert caplog.messages[0].startswith("read as a recipe of NeMo-RL ")
    assert config.teacher is not None
    assert config.teacher.model_parallel_size == 4
    assert config.teachers["math"] == config.teacher
    assert (
        not load("teacher: {megatron_cfg: {enabled: false, unknown: 1}}")
        .teacher_sections["teacher"]
        .megatron_cfg.enabled
    )


def test_teachers_are_read_by_opd_alone_in_grpo(tmp_path: Path) -> None:
    path = tmp_path / "grpo.yaml"
    path.write_text(
        SMALLEST.replace(
            "distillation: {num_prompts_per_step: 8}", "grpo: {num_prompts_per_step: 4, num_generations_per_prompt: 2}"
        )
    )
    with pytest.raises(ConfigError, match=r"teacher = .*adv_estimator\.name: opd"):
        load_config(path)
    assert load_config(path, ["grpo.adv_estimator.name=opd"]).teacher_sections.keys() == {"teacher"}
    for overrides in (
        ["loss_fn.use_kl_in_reward=true", "loss_fn.reference_policy_kl_penalty=0.1"],
        ["grpo.reward_scaling.enabled=true"],
        ["grpo.use_dynamic_sampling=true"],
    ):
        with pytest.raises(ConfigError, match="opd reads no reward"):
            load_config(path, ["grpo.adv_estimator.name=opd", *overrides])
    assert load_config(path, ["grpo.adv_estimator.name=opd"]).min_group_size == 1  # nothing is compared in a group


def layout(load: LoadDistillation, device: Any, *overrides: str) -> Layout:
    return make_layout(load("", *overrides), device)


def test_a_teacher_of_several_ranks_needs_a_cluster_and_one_does_not(load: LoadDistillation) -> None:
    one = layout(load, "cpu")
    assert one.teachers == {"teacher": (DeviceSlot(0),)}
    assert not one.needs_cluster
    several = layout(load, "cpu", "teacher.dtensor_cfg={data_parallel_size: 2, tensor_parallel_size: 2}")
    assert len(several.teachers["teacher"]) == 4
    assert several.needs_cluster
    assert len(several.ranks) == 1


def test_a_teacher_on_megatron_stands_on_processes_of_its_own(load: LoadDistillation) -> None:
    assert layout(load, "cpu", "++teacher.megatron_cfg.enabled=true").needs_cluster
    stages = "++teacher.megatron_cfg={enabled: true, pipeline_model_parallel_size: 2, data_parallel_size: 2}"
    several = layout(load, "cpu", stages)
    assert len(several.teachers["teacher"]) == 4
    assert len(several.ranks) == 1
    assert len(layout(load, "cuda", "cluster.gpus_per_node=8", stages).teachers["teacher"]) == 4


def test_on_gpus_a_teacher_is_colocated_or_takes_the_last_ones(load: LoadDistillation) -> None:
    gpus = "cluster.gpus_per_node=4"
    shared = layout(load, "cuda", gpus, "teacher.dtensor_cfg.tensor_parallel_size=2")
    assert shared.teachers["teacher"] == shared.ranks == tuple(DeviceSlot(0, (gpu,)) for gpu in range(4))
    own = layout(load, "cuda", gpus, "teacher.colocated={enabled: false, resources: {gpus_per_node: 1}}",
                 "policy.dtensor_cfg.data_parallel_size=2")  # fmt: skip
    assert own.teachers["teacher"] == (DeviceSlot(0, (3,)),)
    assert own.ranks == (DeviceSlot(0, (0,)), DeviceSlot(0, (1,)))
    assert {gpu for place in own.engines for gpu in place.gpus} == {0, 1, 2}
    nodes = layout(load, "cuda", gpus, "cluster.num_nodes=2",
                   "teacher.colocated={enabled: false, resources: {num_nodes: 1}}")  # fmt: skip
    assert {place.node for place in nodes.teachers["teacher"]} == {1}
    assert {place.node for place in (*nodes.ranks, *nodes.engines)} == {0}


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("teacher.colocated.enabled=false",), "teacher.colocated.resources.gpus_per_node"),
        (("teacher.colocated={enabled: false, resources: {num_nodes: 1}}",), "teacher.colocated.resources.num_nodes"),
        (("teacher.dtensor_cfg.tensor_parallel_size=3",), "teacher.dtensor_cfg.tensor_parallel_size"),
        (("teacher.dtensor_cfg.data_parallel_size=5",), "teacher.dtensor_cfg.data_parallel_size"),
        (
            ("++teacher.megatron_cfg={enabled: true, pipeline_model_parallel_size: 5}",),
            "teacher.megatron_cfg.pipeline_model_parallel_size",
        ),
        (("teacher.device=cpu",), "teacher.device"),
    ],
)
def test_a_layout_that_cannot_be_names_its_key(load: LoadDistillation, overrides: tuple[str, ...], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        layout(load, "cuda", "cluster.gpus_per_node=4", *overrides)
    assert refused.value.key == key
