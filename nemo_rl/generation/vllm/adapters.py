"""The versions of an adapter that a vLLM engine holds, and the requests that run under each."""

from collections.abc import Iterator, Mapping, Sequence
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
    """A version of the adapters of all policies in the engine."""

    weight_version: int
    numbers: Mapping[str, int]  # each adapter's, by the name of its policy
    num_running: int = 0  # requests

    def number_of(self, policy: str) -> int:
        """Return the number of a policy's adapter; raises ValueError for a name that is not a policy of the run."""
        if policy not in self.numbers:
            raise ValueError(f"no policy named {policy!r}; known: {', '.join(map(repr, self.numbers))}")
        return self.numbers[policy]


class AdapterVersions:
    """The versions that requests may be sampled under: the newest `num_versions`, and older ones while a request runs.

    vLLM knows each adapter by a number that is in its name and path too. No number is used twice, so that the prefix
    cache, which is keyed by name and path, never serves what another adapter computed.
    """

    def __init__(self, num_versions: int, policies: Sequence[str] = ("",)) -> None:
        self._num_versions = num_versions
        self._policies = tuple(policies)
        self._held: list[AdapterVersion] = []  # oldest first
        self._next_number = 1

    @property
    def held(self) -> tuple[int, ...]:
        """Return the weight versions that the engine holds, oldest first."""
        return tuple(each.weight_version for each in self._held)

    def next_number(self) -> int:
        """Return the first number of the version that is loaded next; those of further policies follow it."""
        number = self._next_number
        self._next_number += len(self._policies)
        return number

    def add(self, weight_version: int, number: int) -> list[int]:
        """Make a loaded version, whose first number is `number`, the newest; return the numbers that are no longer
        needed."""
        numbers = {policy: number + index for index, policy in enumerate(self._policies)}
        self._held.append(AdapterVersion(weight_version, numbers))
        unused = [each for each in self._held[: -self._num_versions] if not each.num_running]
        self._held = [each for each in self._held if each not in unused]
        return [number for each in unused for number in each.numbers.values()]

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
    per_version = len(slots.policies)
    return {
        "enable_lora": True,
        "max_lora_rank": next(rank for rank in RANKS if rank >= slots.rank),
        "max_loras": slots.num_versions * per_version,
        "max_cpu_loras": (slots.num_versions + 1) * per_version,  # while the next version is loaded
    }
