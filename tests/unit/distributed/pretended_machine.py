"""A machine that this one is not: its packages, its GPU and the driver are replaced."""

from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nemo_rl.distributed import devices

DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Wed Feb  5 2025\nGCC version: 13\n"
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build\n"
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")  # of torch 2.13's wheel for CUDA 13


class PretendedMachine:
    """What this machine is made to look like, by `has`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self._patch, self._file = monkeypatch, tmp_path / "version"
        monkeypatch.setattr(devices, "DRIVER_FILE", self._file)

    def has(
        self,
        *packages: str,
        cuda: bool,
        driver: str | None = None,
        text: str = DRIVER,
        built: str | None = "13.0",
        capability: tuple[int, int] = (9, 0),
        architectures: tuple[str, ...] = ARCHITECTURES,
        compiler_problem: str | None = None,
    ) -> None:
        def version(name: str) -> str:
            if name in packages:
                return "0.32.0"
            raise PackageNotFoundError(name)

        self._patch.setattr(devices, "version", version)
        self._patch.setattr(devices, "compiler_problem", lambda: compiler_problem)
        self._patch.setattr(torch.cuda, "is_available", lambda: cuda)
        self._patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        properties = SimpleNamespace(total_memory=80 * 10**9)
        self._patch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
        self._patch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
        self._patch.setattr(torch.cuda, "get_arch_list", lambda: list(architectures))
        self._patch.setattr(torch.version, "cuda", built)
        if driver is not None:
            self._file.write_text(text.format(driver))
