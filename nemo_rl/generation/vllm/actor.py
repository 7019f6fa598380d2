"""vLLM in a Ray actor: the front end of the engine, which takes time of its own, leaves the trainer's process."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_rl.distributed.actors import ActorHandle, spawn_actor
from nemo_rl.errors import GenerationError, WeightSyncError, WorkerError
from nemo_rl.generation.engines import EngineModel
from nemo_rl.generation.node_file import release
from nemo_rl.generation.vllm.engine import CONTROL_S, VllmGeneration
from nemo_rl.generation.vllm.entry import VllmGenerationConfig
from nemo_rl.generation.vllm.process_environment import environment
from nemo_rl.interfaces import EnginePart
from nemo_rl.types import Completion, FailedRequest, GenerationRequest
from nemo_rl.weight_manifests import Weights

CLOSE_S = 60.0
CALL_TIMEOUT_S = CONTROL_S + 30.0  # longer than the engine's own deadline, whose error says what took too long
MAX_CONCURRENCY = 10_000  # calls at once: above any number of requests


class VllmActor:
    """The engine inside the actor."""

    def __init__(self, section: VllmGenerationConfig, model: EngineModel) -> None:
        self._section = section
        self._model = model
        self._engine: VllmGeneration | None = None

    async def start(self) -> None:
        self._engine = await VllmGeneration.create(self._section, self._model)

    @property
    def engine(self) -> VllmGeneration:
        if self._engine is None:
            raise GenerationError("the engine was not started")
        return self._engine

    async def answer(self, request: GenerationRequest) -> Completion | FailedRequest:
        return await anext(self.engine.generate([request]))

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
        async for result in self.engine.generate(requests):
            yield result

    async def answer_as_sampled(
        self, request: GenerationRequest
    ) -> AsyncIterator[tuple[int, Sequence[int]] | Completion | FailedRequest]:
        """Yield sampled tokens with the index of the first, then the answer."""
        tokens: asyncio.Queue[tuple[int, Sequence[int]] | None] = asyncio.Queue()
        request = replace(request, on_tokens=lambda start, new: tokens.put_nowait((start, new)))
        task = asyncio.ensure_future(self.answer(request))
        task.add_done_callback(lambda _: tokens.put_nowait(None))
        try:
            while (new := await tokens.get()) is not None:
                yield new
            yield await task
        finally:
            task.cancel()

    async def pause(self, *, keep_cache: bool) -> None:
        await self.engine.pause(keep_cache=keep_cache)

    async def resume(self) -> None:
        await self.engine.resume()

    async def update_weights(self, manifest: Weights, weight_version: int, *, adapter_only: bool = False) -> str | None:
        """Load weights; return why the engine refused them, else None: an exception would mean a death."""
        load = self.engine.load_adapter if adapter_only else self.engine.update_weights
        try:
            await load(manifest, weight_version)
        except WeightSyncError as error:
            return str(error)
        return None

    async def sleep(self, *, discards_weights: bool) -> None:
        await self.engine.sleep(discards_weights=discards_weights)

    async def wake(self, *, parts: Sequence[EnginePart]) -> None:
        await self.engine.wake(*parts)

    async def start_profile(self, directory: Path, name: str) -> None:
        await self.engine.start_profile(directory, name)

    async def stop_profile(self) -> None:
        await self.engine.stop_profile()

    async def close(self) -> None:
        release()
        await self.engine.close()


class VllmActorGeneration:
    """`VllmGeneration` in an actor; the death of engine or process is a GenerationError here."""

    def __init__(self, actor: ActorHandle) -> None:
        """Use `create`."""
        self._actor = actor
        self._closed = False

    @classmethod
    async def create(
        cls,
        section: VllmGenerationConfig,
        model: EngineModel,
        *,
        start_timeout_s: float,
        slot: Any = None,
        index: int = 0,
        num_replicas: int = 1,
    ) -> "VllmActorGeneration":
        """Start actor and engine; raises GenerationError when they do not start within `start_timeout_s`.

        It runs on `slot`, or where Ray puts it. `index` is its number; `num_replicas` like it share the cores of a CPU.
        """
        placed = {} if slot is None else {"slot": slot}
        needs_gpus = model.device == "cuda" and slot is None
        actor = spawn_actor(
            VllmActor,
            section,
            model,
            num_gpus=section.vllm_cfg.tensor_parallel_size if needs_gpus else 0,
            max_concurrency=MAX_CONCURRENCY,
            label=f"engine {index}",
            env_vars=environment(
                model.device,
                num_replicas,
                num_workers=section.num_workers,
                start_timeout_s=start_timeout_s,
                divides_cores=model.divides_cores,
            ),
            **placed,
        )
        try:
            await actor.call("start", timeout_s=start_timeout_s)
        except WorkerError as error:
            actor.kill()
            raise GenerationError(f"vLLM did not start in its actor: {error}") from error
        except BaseException:  # cancelled: its caller does not know it
            actor.kill()
            raise
        return cls(actor)

    @property
    def is_async(self) -> bool:
        return True

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
        try:
            if len(requests) == 1 and (on_tokens := requests[0].on_tokens) is not None:
                plain = replace(requests[0], on_tokens=None)  # a function does not travel
                async for result in self._actor.stream("answer_as_sampled", plain):
                    if isinstance(result, tuple):
                        on_tokens(*result)
                    else:
                        yield result
                return
            if len(requests) == 1:  # a plain call costs less than a stream
                yield await self._actor.call("answer", requests[0])
                return
            plain_requests = [replace(request, on_tokens=None) for request in requests]
            async for result in self._actor.stream("generate", plain_requests):
                yield result
        except WorkerError as error:
            raise GenerationError(f"the engine's actor: {error}") from error

    async def pause(self, *, keep_cache: bool = False) -> None:
        await self._call("pause", keep_cache=keep_cache)

    async def resume(self) -> None:
        await self._call("resume")

    async def update_weights(self, manifest: Weights, weight_version: int) -> None:
        await self._load(manifest, weight_version, adapter_only=False)

    async def begin_refit(self) -> None:
        """Do nothing: a single engine always takes part."""

    async def load_adapter(self, manifest: Weights, weight_version: int) -> None:
        await self._load(manifest, weight_version, adapter_only=True)

    async def _load(self, manifest: Weights, weight_version: int, *, adapter_only: bool) -> None:
        try:
            refusal = await self._actor.call(
                "update_weights", manifest, weight_version, adapter_only=adapter_only, timeout_s=CALL_TIMEOUT_S
            )
        except WorkerError as error:
            raise GenerationError(f"the engine's actor: {error}") from error
        if refusal is not None:
            raise WeightSyncError(refusal)

    async def sleep(self, *, discards_weights: bool = False) -> None:
        await self._call("sleep", discards_weights=discards_weights)

    async def wake(self, *parts: EnginePart) -> None:
        await self._call("wake", parts=parts)

    async def start_profile(self, directory: Path, name: str) -> None:
        await self._call("start_profile", directory, name)

    async def stop_profile(self) -> None:
        await self._call("stop_profile")

    async def close(self) -> None:
        """End engine and actor; may be called twice."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._actor.call("close", timeout_s=CLOSE_S)
        except WorkerError:  # it has died already
            pass
        finally:
            self._actor.kill()

    async def _call(self, name: str, *values: Any, **arguments: Any) -> None:
        try:
            await self._actor.call(name, *values, timeout_s=CALL_TIMEOUT_S, **arguments)
        except WorkerError as error:
            raise GenerationError(f"the engine's actor: {error}") from error
