"""A refit: weights from the policy to every engine by one of the transports, and the check that they arrived."""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from nemo_rl.config.shared_sections import WeightSyncConfig
from nemo_rl.errors import WeightSyncError
from nemo_rl.interfaces import DeviceTurns, Generation, HoldsAdapters, Policy
from nemo_rl.tracing import record_counter, span
from nemo_rl.types import SamplingParams
from nemo_rl.weight_manifests import bytes_of
from nemo_rl.weight_sync.adapters import AdapterSource, AdapterTarget
from nemo_rl.weight_sync.shared_memory import SharedMemory
from nemo_rl.weight_sync.transports import Transport, engine_replicas
from nemo_rl.weight_sync.verification import Probe, Tolerance, compare_logprobs, default_tolerance, sample_probes

logger = logging.getLogger(__name__)

PROBE_TOKENS = 32  # sampled per probe
PROBE_SAMPLING = SamplingParams(PROBE_TOKENS)


class TransportWeightSync:
    """Refits all engines by `transport`; None: through a file in shared memory.

    All engines pause, all load, all resume: none samples under the new weights before all have them. The first refit of
    each engine is verified with `probes` (prompts, or their token ids); on a CPU also the second, which repeats copies
    that the first recorded; with `section.verify` all of them.
    The engine computes in `dtype` on `device`; `sampling` is that of training, whose log-probs the policy computes.
    With `keep_cache` running requests continue with keys and values of the old weights.

    With `adapter_only` a refit brings a further version of the policy's adapter instead: nothing pauses, and requests
    end under the version that they began with. The second refit is always verified, too: at first B is 0. Of a run with
    several policies it brings the adapters of all `policies`, each of which is verified.
    """

    def __init__(
        self,
        probes: Sequence[Sequence[int] | Probe],
        section: WeightSyncConfig,
        dtype: str,
        *,
        device: str = "cpu",
        sampling: SamplingParams = PROBE_SAMPLING,
        keep_cache: bool = False,
        transport: Transport | None = None,
        adapter_only: bool = False,
        policies: Sequence[str] = ("",),
    ) -> None:
        self._probes = [
            probe if isinstance(probe, Probe) else Probe(tuple(probe)) for probe in probes[: section.num_probe_prompts]
        ]
        self._verify_all = section.verify
        wanted = section.verify_tolerance
        self._tolerance = default_tolerance(dtype, device) if wanted is None else Tolerance.of_mean(wanted)
        self._sampling = replace(sampling, max_new_tokens=PROBE_TOKENS)
        self._keep_cache = keep_cache
        self._transport = transport or SharedMemory()
        self._adapter_only = adapter_only
        self._policies = tuple(policies)
        self._num_first = 2 if device == "cpu" or adapter_only else 1  # refits per engine that are always verified
        self._num_verified: WeakKeyDictionary[Generation, int] = WeakKeyDictionary()

    @property
    def keeps_versions(self) -> bool:
        return self._adapter_only

    async def publish(
        self, policy: Policy, generation: Generation, *, weight_version: int, turns: DeviceTurns | None = None
    ) -> None:
        """Refit the engines; running requests are held meanwhile and continue under the new weights.

        Raises WeightSyncError; the engines then stay paused, since they may hold a part of the new weights.
        """
        async with turns.delivery() if turns else nullcontext():
            if self._adapter_only:
                await self._add_version(policy, generation, weight_version)
            else:
                await self._replace_weights(policy, generation, weight_version)
        if not self._adapter_only:
            await generation.resume()
        await self._verify_first(policy, generation, weight_version, turns)

    async def _replace_weights(self, policy: Policy, generation: Generation, weight_version: int) -> None:
        with span("stage weights"):
            staged = await self._transport.stage(policy)
        if (num_bytes := bytes_of(staged)) is not None:
            record_counter("refit/bytes", num_bytes)
        with span("engines paused", "engines", weight_version=weight_version):
            await generation.pause(keep_cache=self._keep_cache)
            await self._transport.deliver(policy, generation, staged, weight_version)
            del staged  # may be a copy of all weights

    async def _add_version(self, policy: Policy, generation: Generation, weight_version: int) -> None:
        if not isinstance(generation, HoldsAdapters):
            raise WeightSyncError(f"{type(generation).__name__} holds no adapters; weight_sync.adapter must be merged")
        source, target = AdapterSource(policy), AdapterTarget(generation)
        with span("add adapter", "engines", weight_version=weight_version):
            await generation.begin_refit()
            staged = await self._transport.stage(source)
            await self._transport.deliver(source, target, staged, weight_version)

    async def _verify_first(
        self, policy: Policy, generation: Generation, weight_version: int, turns: DeviceTurns | None
    ) -> None:
        replicas = engine_replicas(generation)
        unverified = [e for e in replicas if self._verify_all or self._num_verified.get(e, 0) < self._num_first]
        if not unverified:
            return
        if not self._probes:
            logger.warning("no probe prompts: the refit to weights %d is not verified", weight_version)
            return
        with span("verify weights"):
            for name in self._policies:
                await self._verify(policy, name, unverified, weight_version, turns)
        for engine in unverified:
            self._num_verified[engine] = self._num_verified.get(engine, 0) + 1

    async def _verify(
        self, policy: Policy, name: str, engines: Sequence[Generation], weight_version: int, turns: DeviceTurns | None
    ) -> None:
        """Let all engines sample under the policy of a name first, then the policy score their tokens: they may share a
        device."""
        if name:
            await policy.select(name)
        asked: dict[str, Any] = {"sampling": self._sampling, "weight_version": weight_version, "policy": name}
        batches = [await sample_probes(engine, self._probes, **asked) for engine in engines]
        async with turns.policy_turn("weights") if turns else nullcontext():
            logprobs = [await policy.logprobs(batch) for batch in batches]
        for batch, scored in zip(batches, logprobs, strict=True):
            difference = compare_logprobs(batch, scored, self._tolerance, weight_version=weight_version)
            of = f" of {name}" if name else ""
            logger.info("weights %d%s verified: log-probs differ by %.2g on average", weight_version, of, difference)

    def close(self) -> None:
        self._transport.close()
