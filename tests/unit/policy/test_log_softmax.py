"""The Triton kernels without a GPU: values in Triton's interpreter, code for sm_90, and the choice of them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from nemo_rl.policy import log_softmax, log_softmax_kernels
from nemo_rl.policy.log_softmax import RowGradients, has_kernels, logits_gradient, row_statistics

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forget_devices() -> None:
    log_softmax._check_kernels.cache_clear()


def test_kernels_have_the_values_and_gradients_of_the_operations() -> None:
    """Single rows, and models with tied and untied layers, scaled and soft-capped logits, kept and recomputed ones."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "error", "-m", "tests.unit.policy.interpreted_kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)
    assert errors.pop("calls") > 20
    assert errors.pop("kernels") < log_softmax.KERNEL_TOLERANCE  # bfloat16 too
    assert len(errors) == 8
    assert {name: error for name, error in errors.items() if not error < 1e-5} == {}


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    signature = {name: types.get(name, "constexpr" if name in constants else "*fp32") for name in kernel.arg_names}
    is_multiple = [name != "scale" and name not in constants for name in kernel.arg_names]  # of 16, as Qwen's sizes
    attributes = {(index,): [["tt.divisibility", 16]] for index, is_true in enumerate(is_multiple) if is_true}
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": log_softmax_kernels.NUM_WARPS}
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def resources(program: Any, directory: Path) -> str:
    """Return registers, stack and shared memory of the machine code, by the tool that Triton brings."""
    path = directory / "program.cubin"
    path.write_bytes(program.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("has_entropy", [False, True])
@pytest.mark.parametrize("num_ids", [1, 64])
def test_kernels_compile_for_h100(
    has_entropy: bool, num_ids: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Into machine code that reads four numbers at a time and has no stack, so no spilled registers."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    integers = {"ids": "*i64", "num_tokens": "i32", "num_ids": "i32", "row_stride": "i32", "result_stride": "i32"}
    types = {**integers, "scale": "fp32", "gradient": "*bf16"}
    constants = {"BLOCK": log_softmax_kernels.BLOCK, "IDS": num_ids}
    statistics = compiled(log_softmax_kernels.statistics_kernel, types, {**constants, "WANTS_ENTROPY": has_entropy})
    gradient = compiled(log_softmax_kernels.gradient_kernel, types, {**constants, "HAS_ENTROPY": has_entropy})
    for program in (statistics, gradient):
        assert ".target sm_90" in program.asm["ptx"]
        assert "ld.global.v4.b32" in program.asm["ptx"]
        assert "STACK:0" in resources(program, tmp_path)
    assert gradient.asm["ptx"].count("bar.sync") >= 2  # around the pass that overwrites the logits


def test_without_triton_operations_are_used_and_the_cause_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Here Triton finds no driver; without a compiler it fails alike."""
    assert not has_kernels(CPU)
    assert "Triton kernels of log-probs do not run" in caplog.text
    assert "falling back to PyTorch's operations" in caplog.text


def test_wrong_kernels_are_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(log_softmax, "kernel_error", lambda device: 0.02)
    assert not has_kernels(CPU)
    assert "wrong by 0.02" in caplog.text
    monkeypatch.setattr(log_softmax, "kernel_error", lambda device: float("nan"))
    log_softmax._check_kernels.cache_clear()
    assert not has_kernels(CPU)
    monkeypatch.setattr(log_softmax, "kernel_error", lambda device: 1e-6)
    log_softmax._check_kernels.cache_clear()
    assert has_kernels(CPU)


def test_error_of_kernels_shows_wrong_statistics_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels in PyTorch's operations: right ones have no error, and each fault has one beyond the tolerance."""

    def statistics(logits: torch.Tensor, ids: torch.Tensor, scale: float, entropy: bool) -> Any:
        return log_softmax.row_statistics_in_blocks(logits, ids, scale=scale, entropy=entropy)

    def gradient(
        logits: torch.Tensor, result: torch.Tensor, ids: Any, log_total: Any, entropy: Any, *rest: Any
    ) -> None:
        gradients, scale = RowGradients(*rest[:3]), rest[3]
        row = log_softmax.RowStatistics(log_total, entropy, ids)
        result.copy_(log_softmax.logits_gradient_in_blocks(logits, ids, row, gradients, scale=scale))

    def unscaled(*args: Any) -> None:
        gradient(*args[:-1], 1.0)

    def without_duplicates(*args: Any) -> None:
        ids = args[2].clone()
        ids[0, 1:] = torch.tensor([1, 2])
        gradient(*args[:2], ids, *args[3:])

    monkeypatch.setattr(log_softmax_kernels, "row_statistics", statistics)
    monkeypatch.setattr(log_softmax_kernels, "logits_gradient", gradient)
    assert log_softmax.kernel_error(CPU) < log_softmax.KERNEL_TOLERANCE
    for wrong in (unscaled, without_duplicates, lambda *args: args[1].zero_()):
        monkeypatch.setattr(log_softmax_kernels, "logits_gradient", wrong)
        assert log_softmax.kernel_error(CPU) > log_softmax.KERNEL_TOLERANCE
    monkeypatch.setattr(log_softmax_kernels, "logits_gradient", gradient)
    monkeypatch.setattr(log_softmax_kernels, "row_statistics", lambda z, ids, scale, _: statistics(z, ids, 1.0, True))
    assert log_softmax.kernel_error(CPU) > log_softmax.KERNEL_TOLERANCE


def test_gradient_overwrites_logits_of_its_dtype_and_leaves_no_copy() -> None:
    logits, ids = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([[0], [4], [2]])
    statistics = row_statistics(logits, ids, scale=0.5)
    expected = torch.autograd.functional.jacobian(
        lambda z: (0.5 * z).log_softmax(-1).gather(1, ids).sum(), logits.clone()
    )
    gradient = logits_gradient(logits, ids, statistics, RowGradients.of(torch.ones(3, 1), None), scale=0.5)
    assert gradient.data_ptr() == logits.data_ptr()
    torch.testing.assert_close(gradient, expected)
