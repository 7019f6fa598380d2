from typing import Any

import pytest
import torch

from nemo_rl.command_line import Command, ExitCode, run_command
from nemo_rl.config.loading import load_config, load_sft_config
from nemo_rl.errors import GenerationError, WorkerError
from nemo_rl.launch.out_of_memory import advise_on_memory, find_advice
from tests.unit.launch.cuda_recipes import ROOT

CONFIG = load_config(ROOT / "examples/configs/grpo_math_1B.yaml", ())
ENGINE = "policy.generation.vllm_cfg"


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
            "policy.offload=always, a smaller policy.sequence_packing.train_mb_tokens (8192), "
            "policy.dtensor_cfg.activation_checkpointing=true, policy.dtensor_cfg.cpu_offload=true",
        ),
        (
            WorkerError("policy rank 3.train_step raised OutOfMemoryError: CUDA out of memory.\nTraceback ..."),
            "a smaller policy.sequence_packing.train_mb_tokens (8192)",
        ),
        (
            chained(
                GenerationError("vLLM did not start with m: No available memory for the cache blocks. Try increasing"),
                ValueError("No available memory for the cache blocks."),
            ),
            f"raise {ENGINE}.gpu_memory_utilization (0.6) or {ENGINE}.tensor_parallel_size",
        ),
        (
            chained(GenerationError("vLLM did not start"), ValueError("Free memory on device cuda:0 (3/24 GiB) is")),
            f"lower {ENGINE}.gpu_memory_utilization (0.6)",
        ),
        (
            GenerationError("vLLM did not start with m: Engine core initialization failed. See root cause above."),
            "If its log names memory",
        ),
    ],
    ids=["here", "in a worker", "no room for the cache", "a full device", "in the engine's process"],
)
def test_an_error_of_memory_names_the_keys_that_help(error: Exception, expected: str) -> None:
    advice = find_advice(error, CONFIG)
    assert advice is not None
    assert expected in advice


@pytest.mark.parametrize(
    "overrides",
    [
        ("++policy.megatron_cfg.enabled=true", "policy.dtensor_cfg.enabled=false"),
        ("++policy.dtensor_cfg.cpu_offload=true",),
        ("policy.generation.colocated.enabled=false", "policy.generation.colocated.resources.gpus_per_node=1"),
    ],
    ids=["megatron", "offloaded", "split"],
)
def test_advice_names_only_keys_that_exist_and_would_change_something(overrides: tuple[str, ...]) -> None:
    config = load_config(ROOT / "examples/configs/grpo_math_1B.yaml", overrides)
    advice = str(find_advice(torch.OutOfMemoryError("CUDA out of memory"), config))
    assert ("cpu_offload" in advice) == ("colocated" in overrides[0])
    assert ("policy.offload" in advice) == ("colocated" not in overrides[0])


def test_an_engine_that_ran_out_of_memory_gets_the_engines_advice() -> None:
    text = "Engine core initialization failed. torch.OutOfMemoryError: CUDA out of memory"
    assert "If its log names memory" in str(find_advice(GenerationError(text), CONFIG))


def test_other_errors_get_no_advice() -> None:
    assert find_advice(WorkerError("policy rank 0 died"), CONFIG) is None


def test_supervised_training_has_no_engine_to_take_turns_with() -> None:
    advice = find_advice(
        torch.OutOfMemoryError("CUDA out of memory"), load_sft_config(ROOT / "examples/configs/sft_tulu3.yaml")
    )
    assert advice is not None
    assert "policy.offload" not in advice


def test_the_command_line_shows_the_advice_below_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    def run(_: Any) -> ExitCode:
        with advise_on_memory(CONFIG):
            raise GenerationError("vLLM did not start: No available memory for the cache blocks.")

    assert run_command(Command("test", lambda parser: None, run), []) == ExitCode.FAILED
    error, advice = capsys.readouterr().err.splitlines()
    assert error.startswith("GenerationError: vLLM did not start")
    assert "gpu_memory_utilization (0.6)" in advice
