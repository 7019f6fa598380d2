"""vLLM as `interfaces.Generation`: one engine, in a process of its own (CPU and CUDA) or on a thread of this one (CPU).

Prompts go in as token ids; sampled ids and their log-probs come out. Nothing is tokenized here, and text is made only
for requests with stop strings.
"""

import asyncio
import contextlib
import copy
import functools
import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from nemo_rl import types
from nemo_rl.config.shared_sections import TraceConfig
from nemo_rl.distributed.processes import kill_children, wait_until_idle
from nemo_rl.errors import ConfigError, GenerationError, WeightSyncError
from nemo_rl.generation.engines import AdapterSlots, EngineModel
from nemo_rl.generation.requests import as_completed, structured_outputs
from nemo_rl.generation.vllm.adapters import AdapterVersion, AdapterVersions, adapter_request
from nemo_rl.generation.vllm.arguments import engine_arguments, sends_spans
from nemo_rl.generation.vllm.entry import IN_PROCESS_KEY, VllmGenerationConfig
from nemo_rl.generation.vllm.images import engine_input, needs_prepared_process, prepare_classes
from nemo_rl.generation.vllm.process_environment import START_S, restore_environment, starting_engine
from nemo_rl.generation.vllm.request_phases import to_phases
from nemo_rl.generation.vllm.routes import make_route_source
from nemo_rl.interfaces import EnginePart
from nemo_rl.token_columns import NO_COLUMNS, TokenColumns, sampling_mask_columns
from nemo_rl.tracing import trace_headers
from nemo_rl.types import BASE_VERSION, Completion, FailedRequest, GenerationRequest, WeightSpan
from nemo_rl.weight_manifests import DeviceWeights, LocalWeights, WeightChunks, WeightManifest, Weights, WeightStream

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerFactory

    from nemo_rl.generation.vllm.cpu.core_thread import InProcessEngine

logger = logging.getLogger(__name__)

MAX_SEED = 2**63 - 1  # vLLM keeps seeds in an int64
CONTROL_S = 600.0  # limit for the engine to pause, resume, load weights, sleep or wake
OTLP_PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"  # read by vLLM; its default is gRPC
SHUTDOWN_S = 30.0  # the engine's process takes seconds to end; then it is killed


class VllmGeneration:
    """Samples with vLLM's AsyncLLM or an InProcessEngine. All calls are made from the event loop that `create` ran in.

    A request that vLLM refuses is a FailedRequest; when the engine has died, GenerationError is raised for all running
    and all later requests. The other calls raise it too, also when the engine does not answer them in `control_s`, or
    when its processes do nothing for `vllm_cfg.stall_timeout_s` meanwhile.
    """

    def __init__(
        self,
        engine: "AsyncLLM | InProcessEngine",
        section: VllmGenerationConfig,
        *,
        device: str,
        records_routes: bool = False,
        adapters: AdapterSlots | None = None,
        sees: bool = False,
        sends_spans: bool = False,
        control_s: float = CONTROL_S,
    ) -> None:
        """Use `create`."""
        from vllm import SamplingParams  # imported here: it takes seconds and reads the environment
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
        from vllm.v1.engine.exceptions import EngineDeadError

        self._engine = engine
        self._control_s = control_s
        self._stall_timeout_s = section.vllm_cfg.stall_timeout_s
        self._pids: frozenset[int] = frozenset()  # the engine's own processes
        self._uses_request_seeds = section.vllm_cfg.seeds_requests(device)
        self._can_sleep = device != "cpu" and bool(engine.vllm_config.model_config.enable_sleep_mode)
        self._sampling_params = SamplingParams
        self._structured_outputs = StructuredOutputsParams
        self._final_only = RequestOutputKind.FINAL_ONLY
        self._cumulative = RequestOutputKind.CUMULATIVE
        self._tokens_input = tokens_input
        self._refusal_errors = (VLLMClientError, ValueError)
        self._dead_error_type = EngineDeadError
        self._cached_params = functools.lru_cache(self._make_params)
        self._vocab_size: int = engine.vllm_config.model_config.get_vocab_size()
        self._max_model_len: int = engine.vllm_config.model_config.max_model_len
        self._sees = sees
        self._sends_spans = sends_spans
        self._routes = make_route_source(engine, on_cpu=device == "cpu") if records_routes else None
        self._adapters = None if adapters is None else AdapterVersions(adapters.num_versions, adapters.policies)
        self._weight_version = 0
        self._num_running = 0
        self._paused_engine = False
        self._admission_open = asyncio.Event()
        self._admission_open.set()
        self._closed = False

    @classmethod
    async def create(
        cls, section: VllmGenerationConfig, model: EngineModel, *, start_timeout_s: float = START_S
    ) -> "VllmGeneration":
        """Start the engine; raises ConfigError for arguments that vLLM refuses, GenerationError if it does not start.

        With `vllm_cfg.in_process` it starts on a thread; else its process is spawned and imports the main module again:
        scripts need the `__main__` guard.
        """
        cores = {"num_workers": section.num_workers, "divides_cores": model.divides_cores}
        async with starting_engine(model.device, start_timeout_s, **cores):
            engine = start_engine(section, model)
            generation = cls(
                engine,
                section,
                device=model.device,
                records_routes=model.records_routes,
                adapters=model.adapters,
                sees=model.vision_type is not None,
                sends_spans=sends_spans(section, model),
            )
            try:
                async with generation._engine_deadline("start"):
                    if section.vllm_cfg.in_process:
                        await cast("InProcessEngine", engine).start()
                    else:
                        workers = await engine.collective_rpc("detach_from_terminal", args=(os.getpid(),))
                        generation._pids = frozenset(pid for each in workers for pid in each) - {os.getpid()}
                    if model.device == "cpu":
                        await engine.collective_rpc("use_request_streams")
                    if generation._routes is not None:
                        await generation._routes.start()
                    await engine.update_weight_version("0")
            except BaseException:  # a Ctrl-C too: the engine's process must not outlive its caller
                await generation.close()
                raise
        return generation

    @property
    def is_async(self) -> bool:
        return True

    def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion | FailedRequest]:
        return as_completed(requests, self._answer)

    async def _answer(self, request: GenerationRequest) -> Completion | FailedRequest:
        """Answer one request; its cancellation aborts it in the engine."""
        while not self._admission_open.is_set():  # a second pause may come before this task resumes
            await self._admission_open.wait()
        if self._closed:
            raise GenerationError("the engine is closed")
        if self._adapters is None:
            return await self._answer_under(request, None)
        with self._adapters.running(request.weight_version) as adapter:
            return await self._answer_under(request, adapter)

    async def _answer_under(
        self, request: GenerationRequest, adapter: AdapterVersion | None
    ) -> Completion | FailedRequest:
        version = self._weight_version if adapter is None else adapter.weight_version
        is_base = adapter is None and request.weight_version == BASE_VERSION
        self._num_running += 1
        try:
            output = await self._sample(request, adapter)
            columns = NO_COLUMNS if self._routes is None else await self._routes.take(request, output)
        except asyncio.CancelledError:
            if self._routes is not None:
                self._routes.drop(request)
            raise
        except self._dead_error_type as error:
            raise _engine_dead_error() from error
        except self._refusal_errors as error:
            is_too_long = len(request.token_ids) >= self._max_model_len
            return FailedRequest(request.request_id, one_line(error), is_too_long=is_too_long)
        finally:
            self._num_running -= 1
        return to_completion(
            request.request_id,
            output,
            BASE_VERSION if is_base else version,
            columns,
            num_likeliest=self._recorded_width(request.sampling),
            is_version_fixed=is_base or adapter is not None,
        )

    async def _sample(self, request: GenerationRequest, adapter: AdapterVersion | None) -> "RequestOutput":
        if not 0 <= min(request.token_ids, default=0) <= max(request.token_ids, default=0) < self._vocab_size:
            raise ValueError(f"a token id outside the vocabulary of {self._vocab_size}")  # would kill the engine
        token_ids = list(request.token_ids)
        prompt = engine_input(token_ids, request.images) if request.images else self._tokens_input(token_ids)
        num_told = 0
        own: dict[str, Any] = {}
        if adapter is not None:
            own["lora_request"] = adapter_request(adapter.number_of(request.policy))
        if self._sends_spans:
            own["trace_headers"] = trace_headers()
        outputs = self._engine.generate(prompt, self._params(request), request.request_id, **own)
        async with contextlib.aclosing(outputs):  # otherwise the event loop closes it in another task
            async for output in outputs:
                if request.on_tokens is not None and (new := output.outputs[0].token_ids[num_told:]):
                    request.on_tokens(num_told, new)
                    num_told += len(new)
                if request.on_tokens is None or output.finished:  # FINAL_ONLY: the first is the whole answer
                    return output
        raise GenerationError(f"vLLM gave no answer to {request.request_id}")

    def _recorded_width(self, sampling: types.SamplingParams) -> int:
        """Return the likeliest tokens to ask for with each sampled one, so that its set is known; 0: for no set.

        One more than `top_k`, because more than that many tokens stay if the last ones are as likely as each other.
        """
        limit: int = self._engine.vllm_config.model_config.max_logprobs
        return recorded_width(sampling, vocab_size=self._vocab_size, limit=limit)

    def _params(self, request: GenerationRequest) -> "SamplingParams":
        make = self._make_params if request.sampling.guide else self._cached_params  # vLLM modifies params with a guide
        params = copy.copy(make(request.sampling, request.on_tokens is None))
        params.seed = request.seed & MAX_SEED if self._uses_request_seeds else None
        return params

    def _make_params(self, sampling: types.SamplingParams, is_final_only: bool) -> "SamplingParams":
        """Return all but the seed. vLLM's checks take 14 us, a copy a quarter of one."""
        guide = None if sampling.guide is None else self._structured_outputs(**structured_outputs(sampling.guide))
        return self._sampling_params(
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=list(sampling.stop_token_ids),
            stop=list(sampling.stop_strings),
            detokenize=bool(sampling.stop_strings),
            ignore_eos=True,  # only the request's own stop tokens end it, as in every engine
            logprobs=self._recorded_width(sampling),
            flat_logprobs=True,
            structured_outputs=guide,
            output_kind=self._final_only if is_final_only else self._cumulative,
            skip_clone=True,
        )

    async def pause(self, *, keep_cache: bool = False) -> None:
        """Hold all requests; `keep_cache` also keeps cached prefixes for new prompts."""
        self._admission_open.clear()
        if self._num_running:
            # Not AsyncLLM.pause_generation, which sleeps another 20 ms so that in-flight outputs arrive first.
            async with self._engine_deadline("pause"):
                await self._engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=not keep_cache)
            self._paused_engine = True

    async def resume(self) -> None:
        if self._paused_engine:
            async with self._engine_deadline("resume"):
                await self._engine.resume_generation()
            self._paused_engine = False
        self._admission_open.set()

    async def update_weights(self, manifest: Weights, weight_version: int) -> None:
        """Load the model's weights; adapters stay, and apply to them."""
        async with self._loading(manifest):
            await self._load(manifest)
            if not self._paused_engine and not await self._engine.reset_prefix_cache():
                raise WeightSyncError("vLLM kept its prefix cache: weights may be updated only while paused or idle")
            if self._sees:  # features of images are those of the old tower
                await self._engine.reset_encoder_cache()
            await self._engine.update_weight_version(str(weight_version))
        self._weight_version = weight_version

    async def begin_refit(self) -> None:
        """Do nothing: a single engine always takes part."""

    async def load_adapter(self, manifest: Weights, weight_version: int) -> None:
        if self._adapters is None:
            raise WeightSyncError("the engine was started without room for adapters (EngineModel.adapters)")
        number = self._adapters.next_number()
        async with self._loading(manifest):
            await self._load(manifest, number)
            if unused := self._adapters.add(weight_version, number):
                await self._engine.collective_rpc("drop_adapters", args=(unused,))
        self._weight_version = weight_version

    @asynccontextmanager
    async def _loading(self, weights: Weights) -> AsyncIterator[None]:
        """Raise GenerationError if the engine dies or stalls inside the block, WeightSyncError for other errors."""
        waits_for_peers = not isinstance(weights, LocalWeights | WeightManifest)  # or for the network
        async with self._engine_deadline("load weights", waits_for_peers=waits_for_peers):
            try:
                yield
            except (WeightSyncError, self._dead_error_type):
                raise
            except Exception as error:  # errors of the worker arrive as plain Exceptions
                raise WeightSyncError(f"vLLM could not load the weights: {one_line(error)}") from error

    async def _load(self, weights: Weights, adapter: int = 0) -> None:
        """Let the workers load the model's weights, or those of the adapter of a number."""
        if isinstance(weights, WeightChunks):
            from nemo_rl.generation.node_file import write_node_file  # loads Ray

            weights = await asyncio.to_thread(write_node_file, weights)
        if isinstance(weights, LocalWeights) and self._pids:
            raise WeightSyncError("an engine in a process of its own cannot read the policy's tensors")
        method, arguments = weight_loading_call(weights)
        await self._engine.collective_rpc(method, args=(*arguments, adapter) if adapter else arguments)

    async def start_profile(self, directory: Path, name: str) -> None:
        """Begin a profile of vLLM's workers, in the directory that the engine was started with."""
        if self._engine.vllm_config.profiler_config.profiler is not None:
            await cast("AsyncLLM", self._engine).start_profile(f"{name}_engine_{os.getpid()}")

    async def stop_profile(self) -> None:
        if self._engine.vllm_config.profiler_config.profiler is not None:
            async with self._engine_deadline("write its profile"):
                await cast("AsyncLLM", self._engine).stop_profile()

    async def sleep(self, *, discards_weights: bool = False) -> None:
        if self._can_sleep:
            async with self._engine_deadline("sleep"):
                await self._engine.sleep(level=2 if discards_weights else 1)

    async def wake(self, *parts: EnginePart) -> None:
        if self._can_sleep:
            async with self._engine_deadline("wake"):
                await self._engine.wake_up(list(parts) or None)

    @asynccontextmanager
    async def _engine_deadline(self, what: str, *, waits_for_peers: bool = False) -> AsyncIterator[None]:
        """Raise GenerationError if the engine dies or stalls inside the block, or does not finish it in time."""
        stalled = asyncio.Event()
        try:
            async with asyncio.timeout(self._control_s) as deadline:
                watch = asyncio.create_task(self._end_when_stalled(deadline, stalled, waits_for_peers))
                try:
                    yield
                finally:
                    watch.cancel()
        except (TimeoutError, self._dead_error_type) as error:
            if stalled.is_set():
                limit = f"{self._stall_timeout_s:g} s (policy.generation.vllm_cfg.stall_timeout_s)"
                raise GenerationError(f"vLLM did not {what}: its processes did nothing for {limit}") from error
            if isinstance(error, TimeoutError):
                raise GenerationError(f"vLLM did not {what} within {self._control_s:g} s") from error
            raise _engine_dead_error() from error

    async def _end_when_stalled(self, deadline: asyncio.Timeout, stalled: asyncio.Event, waits_for_peers: bool) -> None:
        """Kill the engine's processes and end the deadline once they have done nothing for `stall_timeout_s`."""
        await wait_until_idle(self._pids, self._stall_timeout_s, may_wait=waits_for_peers)
        stalled.set()
        kill_children(self._pids)
        deadline.reschedule(asyncio.get_running_loop().time())

    async def close(self) -> None:
        """End the engine; running requests fail. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._admission_open.set()
        output_handler = self._engine.output_handler
        if output_handler is not None:  # otherwise it would report the shutdown as a death
            output_handler.cancel()
            await asyncio.gather(output_handler, return_exceptions=True)
        await asyncio.to_thread(self._engine.shutdown, SHUTDOWN_S)


def start_engine(section: VllmGenerationConfig, model: EngineModel) -> "AsyncLLM | InProcessEngine":
    """Start an engine; raises ConfigError for arguments that vLLM refuses, GenerationError if it does not start."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    if section.vllm_cfg.in_process and model.device != "cpu":
        raise ConfigError(IN_PROCESS_KEY, True, f"the device is {model.device}; allowed: false, or policy.device: cpu")
    if model.vision_type is not None:
        if not section.vllm_cfg.in_process and needs_prepared_process(model.vision_type):
            problem = f"vLLM loads a {model.vision_type} without torchvision in this process alone; allowed: true"
            raise ConfigError(IN_PROCESS_KEY, section.vllm_cfg.in_process, problem)
        prepare_classes(model.vision_type)
    arguments, before = engine_arguments(section, model), dict(os.environ)
    if sends_spans(section, model):
        os.environ.setdefault(OTLP_PROTOCOL_VARIABLE, "http/protobuf")
    # The sizes of batches that vLLM chooses by the device are those of its offline class, for the highest throughput.
    context = None if model.device == "cpu" else UsageContext.LLM_CLASS
    try:
        config = AsyncEngineArgs(**arguments).create_engine_config(context)
    except Exception as error:  # vLLM's checks raise TypeError, ValueError, AssertionError and others
        key = "policy.generation.vllm_kwargs" if section.vllm_kwargs else "policy.generation.vllm_cfg"
        raise ConfigError(
            key, section.vllm_kwargs or section.vllm_cfg.model_dump(), f"vLLM refuses: {error}"
        ) from error
    try:
        if section.vllm_cfg.in_process:
            from nemo_rl.generation.vllm.cpu.core_thread import InProcessEngine

            restore_environment(before, {"LD_PRELOAD"})  # now: other processes may start beside the core
            return InProcessEngine(config, is_traced=model.trace.enabled)
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_vllm_config(config, stat_loggers=_counters(model.trace), disable_log_stats=True)
    except Exception as error:
        raise GenerationError(f"vLLM did not start with {model.model_path}: {error}") from error


def _counters(trace: TraceConfig) -> "list[StatLoggerFactory] | None":
    """Return the loggers by which vLLM reports its counters and times its requests; None without a trace."""
    if not trace.enabled:
        return None
    from nemo_rl.generation.vllm.stat_logger import TraceStatLogger  # imports vLLM

    return [TraceStatLogger]


def _engine_dead_error() -> GenerationError:
    return GenerationError("vLLM's engine has died; its log, or the cause of this error, tells why")


def weight_loading_call(weights: LocalWeights | WeightManifest | DeviceWeights | WeightStream) -> tuple[str, Any]:
    """Return the worker's method that loads `weights` (worker.py) and its arguments."""
    if isinstance(weights, LocalWeights):
        return "load_tensors", (weights.tensors,)
    if isinstance(weights, WeightStream):
        return "load_weight_stream", astuple(weights)
    if isinstance(weights, DeviceWeights):
        return "load_device_weights", astuple(weights)
    entries = [(entry.name, entry.dtype, list(entry.shape), entry.offset) for entry in weights.entries]
    return "load_weight_file", (weights.path, entries)


def recorded_width(sampling: types.SamplingParams, *, vocab_size: int, limit: int) -> int:
    """Return `_recorded_width` of an engine that returns at most `limit` log-probs per token; warns if that is less."""
    if not sampling.needs_sampling_mask:
        return 0
    width = min(sampling.top_k + 1 if sampling.top_k > 0 else vocab_size, vocab_size)
    if width <= limit:
        return width
    _warn_that_sets_are_missing(width, limit)
    return 0


@functools.lru_cache
def _warn_that_sets_are_missing(width: int, limit: int) -> None:
    """Warn once per process."""
    logger.warning(
        "policy.generation: the sets that tokens are drawn from are not recorded: one may have %d tokens, vLLM returns "
        "%d; the policy truncates its own logits, which differ by rounding (top_k of at most %d has recorded sets)",
        *(width, limit, limit - 1),
    )


def to_completion(
    request_id: str,
    output: "RequestOutput",
    version: int,
    columns: TokenColumns = NO_COLUMNS,
    *,
    num_likeliest: int = 0,
    is_version_fixed: bool = False,
) -> Completion | FailedRequest:
    """Return the request's result; `version` is the weight version at its start, used if the engine reports none, or if
    it holds to the end.

    `columns` are those from elsewhere; `num_likeliest` tokens were requested beside each sampled one.
    """
    sampled: Any = output.outputs[0]
    if sampled.finish_reason not in ("stop", "length"):
        return FailedRequest(request_id, f"vLLM ended it with {sampled.finish_reason!r}")
    reported = () if is_version_fixed else sampled.weight_versions or ()
    spans = tuple(WeightSpan(int(s.version), s.start, s.end) for s in reported)
    return Completion(
        request_id,
        tuple(sampled.token_ids),
        tuple(sampled.logprobs.logprobs[:: num_likeliest + 1]),  # the sampled token is first
        sampled.finish_reason,
        weight_versions=(spans[0].version, spans[-1].version) if spans else (version, version),
        weight_spans=spans if len(spans) > 1 else (),
        columns=columns.completed(_sampling_mask(output, num_likeliest)) if num_likeliest else columns,
        phases=to_phases(output.metrics),
    )


def _sampling_mask(output: "RequestOutput", num_likeliest: int) -> TokenColumns:
    """Return the sets that tokens were drawn from: those likeliest ones that have a probability.

    A set is unknown, hence missing, if all of them have one: there may be more.
    """
    sampled: Any = output.outputs[0]
    flat, shape = sampled.logprobs, (len(sampled.token_ids), num_likeliest + 1)
    ids, logprobs = (np.array(values).reshape(shape)[:, 1:] for values in (flat.token_ids, flat.logprobs))
    is_kept = np.isfinite(logprobs)
    sets = [None if kept.all() else own[kept] for own, kept in zip(ids, is_kept, strict=True)]
    return sampling_mask_columns(sets, num_prompt_tokens=len(output.prompt_token_ids or ()))


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:500]
