"""A refit: weights from the policy to every engine by one of the transports, and the check that they arrived."""

import logging
from collections.abc import Sequence
from weakref import WeakSet

from nemo_rl.config.run import WeightSyncConfig
from nemo_rl.interfaces import Generation, Policy, engine_replicas
from nemo_rl.weight_sync.transport import SharedMemory, Transport
from nemo_rl.weight_sync.verify import verify_weights

FLOAT32_TOLERANCE = 1e-4
LOW_PRECISION_TOLERANCE = 0.1

log = logging.getLogger(__name__)


class TransportWeightSync:
    """Publishes by `transport`; None: through a file in shared memory.

    All engines pause, all load, all go on: none samples under the new weights before all have them. The first refit of
    each engine is verified with `probes` (token ids of prompts), later ones where `section.verify` says so.
    `dtype` is that of the engine's computation, `temperature` that which the policy divides its logits by. With
    `keep_cache` running requests go on with keys and values of the old weights.
    """

    def __init__(
        self,
        probes: Sequence[Sequence[int]],
        section: WeightSyncConfig,
        dtype: str,
        *,
        temperature: float = 1.0,
        keep_cache: bool = False,
        transport: Transport | None = None,
    ) -> None:
        self._probes = [tuple(probe) for probe in probes[: section.num_probe_prompts]]
        self._verify_all = section.verify
        default = FLOAT32_TOLERANCE if dtype == "float32" else LOW_PRECISION_TOLERANCE
        self._tolerance = section.verify_tolerance or default
        self._temperature = temperature
        self._keep_cache = keep_cache
        self._transport = transport or SharedMemory()
        self._verified: WeakSet[Generation] = WeakSet()

    async def publish(self, policy: Policy, generation: Generation, *, weight_version: int) -> None:
        """Running requests are held meanwhile and go on under the new weights.

        Raises WeightSyncError; the engine then stays paused, since it may hold a part of the new weights.
        """
        staged = await self._transport.stage(policy)
        await generation.pause(keep_cache=self._keep_cache)
        await self._transport.deliver(policy, generation, staged, weight_version)
        await generation.resume()
        for engine in engine_replicas(generation):
            if self._verify_all or engine not in self._verified:
                await self._verify(policy, engine, weight_version)
                self._verified.add(engine)

    async def _verify(self, policy: Policy, engine: Generation, weight_version: int) -> None:
        if not self._probes:
            log.warning("no probe prompts: the refit to weights %d is not verified", weight_version)
            return
        difference = await verify_weights(
            policy,
            engine,
            probes=self._probes,
            temperature=self._temperature,
            tolerance=self._tolerance,
            weight_version=weight_version,
        )
        log.info("weights %d verified: log-probs differ by at most %.2g", weight_version, difference)

    def close(self) -> None:
        self._transport.close()
