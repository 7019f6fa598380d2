"""Weights from a policy in this process to an engine on this machine, through a file in shared memory."""

import logging
from collections.abc import Sequence

from nemo_rl.config.run import WeightSync as WeightSyncSection
from nemo_rl.interfaces import Generation, Policy
from nemo_rl.weight_sync.verify import verify_weights
from nemo_rl.weight_sync.weight_file import WeightFile

FLOAT32_TOLERANCE = 1e-4
LOW_PRECISION_TOLERANCE = 0.1

log = logging.getLogger(__name__)


class InProcessWeightSync:
    """Publishes by writing a weight file that the engine maps; one file, written again at each refit.

    The first refit is verified with `probes` (token ids of prompts), later ones where `section.verify` says so.
    `dtype` is that of the engine's computation, `temperature` that which the policy divides its logits by. With
    `keep_cache` running requests go on with keys and values of the old weights.
    """

    def __init__(
        self,
        probes: Sequence[Sequence[int]],
        section: WeightSyncSection,
        dtype: str,
        *,
        temperature: float = 1.0,
        keep_cache: bool = False,
    ) -> None:
        self._probes = [tuple(probe) for probe in probes[: section.num_probe_prompts]]
        self._verify_all = section.verify
        default = FLOAT32_TOLERANCE if dtype == "float32" else LOW_PRECISION_TOLERANCE
        self._tolerance = section.verify_tolerance or default
        self._temperature = temperature
        self._keep_cache = keep_cache
        self._is_first = True
        self._file = WeightFile()

    async def publish(self, policy: Policy, generation: Generation, *, weight_version: int) -> None:
        """Running requests are held meanwhile and go on under the new weights.

        Raises WeightSyncError; the engine then stays paused, since it may hold a part of the new weights.
        """
        manifest = await policy.with_weights(self._file.write)
        await generation.pause(keep_cache=self._keep_cache)
        await generation.update_weights(manifest, weight_version)
        await generation.resume()
        if self._is_first or self._verify_all:
            await self._verify(policy, generation, weight_version)
        self._is_first = False

    async def _verify(self, policy: Policy, generation: Generation, weight_version: int) -> None:
        if not self._probes:
            log.warning("no probe prompts: the refit to weights %d is not verified", weight_version)
            return
        difference = await verify_weights(
            policy,
            generation,
            probes=self._probes,
            temperature=self._temperature,
            tolerance=self._tolerance,
            weight_version=weight_version,
        )
        log.info("weights %d verified: log-probs differ by at most %.2g", weight_version, difference)

    def close(self) -> None:
        self._file.close()
