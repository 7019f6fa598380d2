import asyncio
import os
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl.config.layout import DeviceSlot, Layout
from nemo_rl.config.policy import RouterReplayConfig
from nemo_rl.errors import ConfigError, GenerationError
from nemo_rl.generation.driver_engines import DriverEngineConfig
from nemo_rl.generation.engines import EngineModel
from nemo_rl.generation.vllm import process_environment
from nemo_rl.generation.vllm.arguments import engine_arguments
from nemo_rl.generation.vllm.cpu import settings
from nemo_rl.generation.vllm.engine import start_engine
from nemo_rl.generation.vllm.entry import VllmConfig, VllmGenerationConfig, check_vllm
from nemo_rl.generation.vllm.process_environment import environment, importing_vllm, starting_engine
from tests.contracts.engines import save_tiny_model


def arguments(device: str = "cpu", **section):
    return engine_arguments(VllmGenerationConfig(**section), EngineModel("model", "bfloat16", 1024, device))


def test_cpu_engine_never_computes_a_prompt_in_parts():
    chosen = arguments()
    assert chosen["enable_chunked_prefill"] is False
    assert chosen["max_num_batched_tokens"] == 8192
    assert arguments(vllm_cfg=VllmConfig(max_model_len=20_000))["max_num_batched_tokens"] == 20_000
    with pytest.raises(ConfigError, match="enable_chunked_prefill"):
        arguments(vllm_kwargs={"enable_chunked_prefill": True})
    unseeded = arguments(vllm_kwargs={"enable_chunked_prefill": True}, vllm_cfg=VllmConfig(seed_requests=False))
    assert unseeded["enable_chunked_prefill"] is True


def test_speculation_is_refused_on_a_cpu_before_a_model_loads_and_left_to_vllm_on_cuda():
    """Measured on vLLM 0.32: chi-square 22,722 with 61 degrees of freedom, 36% of the log-probs NaN."""
    speculative = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    with pytest.raises(ConfigError, match=r"vllm_kwargs\.speculative_config = .*wrong distribution"):
        arguments(vllm_kwargs=speculative)
    assert arguments("cuda", vllm_kwargs=speculative)["speculative_config"] == speculative["speculative_config"]
    section = VllmGenerationConfig(vllm_kwargs=speculative)
    layout = Layout("cpu", 1, 0, (DeviceSlot(0),), (DeviceSlot(0),), is_split=False, needs_cluster=False)
    with pytest.raises(ConfigError, match="wrong distribution"):
        section.check_layout(layout, collects_in_background=False)
    section.check_layout(replace(layout, device="cuda"), collects_in_background=False)


def test_requests_are_seeded_on_a_cpu_and_on_request():
    assert VllmConfig().seeds_requests("cpu")
    assert not VllmConfig().seeds_requests("cuda")
    assert VllmConfig(seed_requests=True).seeds_requests("cuda")
    assert not VllmConfig(seed_requests=False).seeds_requests("cpu")


def test_engines_without_seeded_requests_draw_different_numbers():
    assert len({arguments("cuda")["seed"] for _ in range(8)}) > 1
    assert arguments("cuda", vllm_kwargs={"seed": 3})["seed"] == 3
    assert "seed" not in arguments("cpu")
    assert "seed" not in arguments("cuda", vllm_cfg=VllmConfig(seed_requests=True))


def test_section_wins_over_the_run_and_vllm_kwargs_over_both():
    assert arguments()["dtype"] == "bfloat16"
    cfg = VllmConfig(precision="float32", max_model_len=64, max_num_seqs=8, kv_cache_memory_bytes=2**20)
    chosen = arguments(vllm_cfg=cfg, vllm_kwargs={"max_num_seqs": 9, "seed": 3})
    assert (chosen["dtype"], chosen["max_model_len"], chosen["max_num_seqs"]) == ("float32", 64, 9)
    assert (chosen["kv_cache_memory_bytes"], chosen["seed"]) == (2**20, 3)


def test_cuda_engine_sizes_its_cache_by_utilization_and_sleeps_where_the_trainer_shares_its_device():
    chosen = arguments("cuda")
    assert (chosen["kv_cache_memory_bytes"], chosen["enforce_eager"], chosen["enable_sleep_mode"]) == (
        None,
        False,
        True,
    )
    assert "enable_chunked_prefill" not in chosen
    assert arguments("cuda", colocated={"enabled": False})["enable_sleep_mode"] is False
    assert arguments("cuda", vllm_cfg=VllmConfig(enable_sleep_mode=False))["enable_sleep_mode"] is False


def test_cuda_engine_leaves_the_size_of_its_batches_to_vllm():
    assert (arguments("cuda")["max_num_seqs"], "max_num_batched_tokens" in arguments("cuda")) == (None, False)
    assert arguments("cuda", vllm_cfg=VllmConfig(max_num_seqs=64))["max_num_seqs"] == 64
    assert arguments("cpu")["max_num_seqs"] == 256


def test_cuda_engine_on_several_devices_never_uses_rays_executor():
    assert arguments("cuda", vllm_cfg=VllmConfig(tensor_parallel_size=2))["distributed_executor_backend"] == "mp"
    assert "distributed_executor_backend" not in arguments("cuda")


def test_cuda_engine_returns_routes_itself_and_only_if_they_are_replayed():
    model = EngineModel("model", "bfloat16", 1024, "cuda", records_routes=True)
    assert engine_arguments(VllmGenerationConfig(), model)["enable_return_routed_experts"] is True
    assert "enable_return_routed_experts" not in arguments("cuda")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_logits_of_a_bfloat16_engine_are_float32_unless_the_user_says_otherwise(device: str):
    assert arguments(device)["hf_overrides"] == {"head_dtype": "float32"}
    assert "hf_overrides" not in arguments(device, vllm_cfg=VllmConfig(precision="float32"))
    assert arguments(device, vllm_kwargs={"hf_overrides": {"rope_theta": 1e6}})["hf_overrides"] == {
        "head_dtype": "float32",
        "rope_theta": 1e6,
    }
    kept = arguments(device, vllm_kwargs={"hf_overrides": {"head_dtype": "model"}})
    assert kept["hf_overrides"] == {"head_dtype": "model"}


def chosen_process(*, beside_training: bool = False, device: str = "cpu", needs_cluster: bool = False, **section):
    layout: Any = SimpleNamespace(device=device, needs_cluster=needs_cluster)
    made = VllmGenerationConfig(**section).for_layout(layout, samples_beside_training=beside_training)
    return made.vllm_cfg.in_process


@pytest.mark.parametrize(
    ("architecture", "is_own"),
    [
        ("LlamaForCausalLM", True),
        ("Qwen2ForCausalLM", True),
        ("Qwen3MoeForCausalLM", True),
        ("Olmo2ForCausalLM", False),
        ("SmolLM3ForCausalLM", False),
        ("GPTNeoXForCausalLM", False),
        ("Starcoder2ForCausalLM", False),
        ("OfAUserForCausalLM", False),
    ],
)
def test_a_model_that_vllm_runs_with_transformers_classes_has_an_engine_of_its_own_process(
    architecture: str, is_own: bool
) -> None:
    section, wanted = VllmGenerationConfig(), VllmGenerationConfig(vllm_cfg=VllmConfig(in_process=True))
    if is_own:
        assert section.for_model([architecture]) is section
        assert wanted.for_model([architecture]) is wanted
        transformers = VllmGenerationConfig(vllm_kwargs={"model_impl": "transformers"})
        assert transformers.for_model([architecture]).vllm_cfg.in_process is False
    else:
        assert section.for_model([architecture]).vllm_cfg.in_process is False
        with pytest.raises(ConfigError, match=rf"in_process = True: vLLM runs {architecture} with transformers'"):
            wanted.for_model([architecture])
        hf = DriverEngineConfig(backend="hf")
        assert hf.for_model([architecture]) is hf


def test_engine_is_in_the_trainers_process_where_they_take_turns_on_a_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([self / "node0"]))
    assert chosen_process() is True
    assert chosen_process(device="cuda") is False
    assert chosen_process(needs_cluster=True) is False
    assert chosen_process(beside_training=True) is False
    assert chosen_process(in_actor=True) is False
    assert chosen_process(vllm_kwargs={"data_parallel_size": 2}) is False
    assert chosen_process(vllm_cfg=VllmConfig(in_process=False)) is False
    assert chosen_process(vllm_cfg=VllmConfig(in_process=True), beside_training=True) is True
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    assert chosen_process() is False
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([self / "node0", self / "node1"]))
    assert chosen_process() is False


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"in_actor": True}, "actors"),
        ({"num_replicas": 2}, "actors"),
        ({"vllm_kwargs": {"data_parallel_size": 2}}, "data_parallel_size"),
    ],
)
def test_engine_in_the_trainers_process_is_one(section, named):
    policy = SimpleNamespace(max_total_sequence_length=64, router_replay=RouterReplayConfig())
    config: Any = SimpleNamespace(policy=policy)
    section = VllmGenerationConfig(vllm_cfg=VllmConfig(in_process=True), **section)
    with pytest.raises(ConfigError, match=rf"vllm_cfg\.in_process.*{named}"):
        check_vllm("policy.generation", section, config)


@pytest.mark.parametrize(("device", "needs_cluster"), [("cuda", False), ("cpu", True)])
def test_engine_in_the_trainers_process_needs_its_cpu(device: str, needs_cluster: bool):
    layout: Any = SimpleNamespace(device=device, needs_cluster=needs_cluster, is_split=False)
    section = VllmGenerationConfig(vllm_cfg=VllmConfig(in_process=True))
    with pytest.raises(ConfigError, match=r"vllm_cfg\.in_process"):
        section.check_layout(layout, collects_in_background=False)


def test_environment_and_random_states_are_put_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = random.random(), np.random.rand(), float(torch.rand(()))
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    with importing_vllm("cpu"):
        assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
        assert os.environ["VLLM_LOGGING_LEVEL"] == "INFO"  # the user's own
        random.seed(2)
        np.random.seed(2)
        torch.manual_seed(2)
    assert "TORCHDYNAMO_DISABLE" not in os.environ
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == expected


def test_vllm_loads_a_model_for_as_long_as_the_run_allows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("VLLM_ENGINE_READY_TIMEOUT_S", raising=False)
    assert environment("cuda", 2, start_timeout_s=949.5)["VLLM_ENGINE_READY_TIMEOUT_S"] == "950"
    monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", "30")  # the user's own stays
    assert "VLLM_ENGINE_READY_TIMEOUT_S" not in environment("cuda", start_timeout_s=949.5)


@pytest.mark.parametrize(
    ("num_replicas", "num_workers", "num_nodes", "divides_cores", "num_threads"),
    [
        (1, 1, 1, False, None),
        (1, 1, 0, False, None),
        (1, 2, 1, False, "4"),
        (1, 2, 0, False, "4"),
        (1, 2, 2, False, None),
        (2, 1, 1, False, "4"),
        (2, 2, 4, False, "2"),
        (9, 2, 1, False, "1"),
        (1, 1, 1, True, "4"),
        (2, 1, 2, True, "2"),
        (4, 2, 1, True, "1"),
    ],
)
def test_replicas_workers_and_a_trainer_divide_the_cores(
    monkeypatch: pytest.MonkeyPatch,
    num_replicas: int,
    num_workers: int,
    num_nodes: int,
    divides_cores: bool,
    num_threads: str | None,
):
    for name in ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(settings, "num_memory_nodes", lambda: num_nodes)
    variables = environment("cpu", num_replicas, num_workers=num_workers, divides_cores=divides_cores)
    assert variables.get("OMP_NUM_THREADS") == num_threads
    assert variables.get("VLLM_CPU_OMP_THREADS_BIND") == (None if num_threads is None else "nobind")
    assert "VLLM_CPU_OMP_THREADS_BIND" not in environment("cuda", num_replicas, num_workers=num_workers)


def test_workers_of_an_engine_are_counted():
    two = VllmConfig(tensor_parallel_size=2)
    assert VllmGenerationConfig().num_workers == 1
    assert VllmGenerationConfig(vllm_cfg=two).num_workers == 2
    assert VllmGenerationConfig(vllm_cfg=two, vllm_kwargs={"pipeline_parallel_size": 3}).num_workers == 6
    assert VllmGenerationConfig(vllm_cfg=two, vllm_kwargs={"tensor_parallel_size": 4}).num_workers == 4
    assert VllmGenerationConfig(vllm_kwargs={"data_parallel_size": "two"}).num_workers == 1


@pytest.mark.parametrize("fails", [False, True])
def test_engines_of_one_process_start_one_after_another(monkeypatch: pytest.MonkeyPatch, fails: bool):
    monkeypatch.delenv("VLLM_ENGINE_READY_TIMEOUT_S", raising=False)
    monkeypatch.setattr(process_environment, "START_POLL_S", 0.0)
    seen: list[tuple[str, str | None]] = []

    async def start(name: str, timeout_s: float) -> None:
        async with starting_engine("cpu", timeout_s):
            for _ in range(3):
                seen.append((name, os.environ.get("VLLM_ENGINE_READY_TIMEOUT_S")))
                await asyncio.sleep(0)
            if fails:
                raise GenerationError(name)

    async def start_two() -> None:
        results = await asyncio.gather(start("a", 1), start("b", 2), return_exceptions=True)
        assert [str(result) for result in results if result is not None] == ["a", "b"] * fails

    asyncio.run(start_two())
    assert seen == [("a", "1")] * 3 + [("b", "2")] * 3
    assert "VLLM_ENGINE_READY_TIMEOUT_S" not in os.environ


@pytest.mark.parametrize("kwargs", [{"no_such_argument": 1}, {"kv_cache_dtype": "float3"}])
def test_arguments_that_vllm_refuses_are_a_config_error(tmp_path: Path, kwargs):
    model_path = str(save_tiny_model(tmp_path, tied=True))
    with importing_vllm("cpu"), pytest.raises(ConfigError, match=r"policy\.generation\.vllm_kwargs"):
        start_engine(VllmGenerationConfig(vllm_kwargs=kwargs), EngineModel(model_path, "float32", 64, "cpu"))
