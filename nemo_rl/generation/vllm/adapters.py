"""The versions of an adapter that a vLLM engine holds, and the requests that run under each."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_rl.generation.engines import AdapterSlots
from nemo_rl.types import BASE_VERSION

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM 0.32 has room; a smaller adapter is padded


@dataclass(slots=True, eq=False)
class AdapterVersion:
    """An adapter in the engine."""

    weight_version: int
    number: int
    num_running: int = 0  # requests


class AdapterVersions:
    """The versions that requests may be sampled under: the newest `num_versions`, and older ones while a request runs.

    vLLM knows each by a number that is in its name and path too. No number is used twice, so that the prefix cache,
    which is keyed by name and path, never serves what another version computed.
    """

    def __init__(self, num_versions: int) -> None:
        self._num_versions = num_versions
        self._held: list[AdapterVersion] = []  # oldest first
        self._numbers = itertools.count(1)

    @property
    def held(self) -> tuple[int, ...]:
        """Return the weight versions that the engine holds, oldest first."""
        return tuple(each.weight_version for each in self._held)

    def next_number(self) -> int:
        """Return the number of the version that is loaded next."""
        return next(self._numbers)

    def add(self, weight_version: int, number: int) -> list[int]:
        """Make a loaded version the newest; return the numbers of those that are no longer needed."""
        self._held.append(AdapterVersion(weight_version, number))
        unused = [each for each in self._held[: -self._num_versions] if not each.num_running]
        self._held = [each for each in self._held if each not in unused]
        return [each.number for each in unused]

    @contextmanager
    def running(self, weight_version: int | None) -> Iterator[AdapterVersion | None]:
        """Return the version of a request, which stays until the block ends; None: the base model, or none is loaded.

        It is `weight_version` if the engine holds it, else the newest.
        """
        if weight_version == BASE_VERSION:
            yield None
            return
        named = (each for each in reversed(self._held) if each.weight_version == weight_version)
        chosen = next(named, self._held[-1] if self._held else None)
        if chosen is None:
            yield None
            return
        chosen.num_running += 1
        try:
            yield chosen
        finally:
            chosen.num_running -= 1


def adapter_request(number: int) -> "LoRARequest":
    """Return what vLLM knows an adapter by; no file has its path."""
    from vllm.lora.request import LoRARequest  # imported here: vLLM takes seconds and reads the environment

    return LoRARequest(f"adapter-{number}", number, f"memory:{number}")


def adapter_arguments(slots: AdapterSlots) -> dict[str, object]:
    """Return the arguments of vLLM's AsyncEngineArgs that make room for the adapters."""
    return {
        "enable_lora": True,
        "max_lora_rank": next(rank for rank in RANKS if rank >= slots.rank),
        "max_loras": slots.num_versions,
        "max_cpu_loras": slots.num_versions + 1,  # while the next one is loaded
    }
