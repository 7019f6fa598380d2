"""vLLM's engine core on a thread of this process, for a CPU that engine and trainer share.

    event loop                           engine thread
    InProcessEngine.generate  --calls-->  CoreThread: admit, step, collect tokens
    awaits its queue        <--outputs--  one message per step, only for outputs that a caller awaits

Unlike AsyncLLM it serialises nothing, and a request that is not streamed gets a single output at its end, with
log-probs joined once instead of token by token. A crash of the core ends this process. The module imports vLLM: import
it inside `importing_vllm`.
"""

import asyncio
import contextlib
import gc
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar, cast

import numpy as np
import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.logprobs import FlatLogprobs
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
from vllm.renderers import renderer_from_config
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.engine import (
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    PauseMode,
)
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.executor import Executor
from vllm.v1.metrics.stats import RequestStateStats

from nemo_rl.distributed.machine import release_openmp_threads
from nemo_rl.errors import GenerationError
from nemo_rl.generation.vllm.request_phases import SchedulerCounters

logger = logging.getLogger(__name__)

IDLE_S = 0.001  # while requests wait for something other than the model, such as the compilation of a grammar

_ONE_AT_A_TIME = threading.RLock()  # vLLM's forward context and current configuration are globals of the process

ResultT = TypeVar("ResultT")
Call = Callable[[], None]
Deliver = Callable[[list[tuple["RunningRequest", Any]]], None]


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A running request and its tokens so far; filled by the core's thread."""

    request: EngineCoreRequest
    outputs: asyncio.Queue[Any]  # RequestOutput or an exception, for the event loop
    detokenizer: IncrementalDetokenizer | None  # None without stop strings
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)  # per step, [tokens, 1 + likeliest tokens requested]
    logprob_ids: list[np.ndarray] = field(default_factory=list)  # ids to these, if any likeliest tokens are requested
    version_starts: list[tuple[str, int]] = field(default_factory=list)  # weights, index of their first token
    times: RequestStateStats | None = None  # None: the engine is not traced

    @property
    def params(self) -> SamplingParams:
        assert self.request.sampling_params is not None
        return self.request.sampling_params

    def add(self, output: EngineCoreOutput, version: str | None) -> tuple[list[int], str | None]:
        """Add the tokens of a step; return the kept ones, and the stop string that they complete."""
        new, stop = output.new_token_ids, None
        if self.detokenizer is not None:
            before = self.detokenizer.num_output_tokens()
            stop = self.detokenizer.update(new, output.finish_reason is FinishReason.STOP)
            if stop is not None:  # drop tokens of the step after the stop string
                new = new[: self.detokenizer.num_output_tokens() - before]
        if new and version is not None and (not self.version_starts or self.version_starts[-1][0] != version):
            self.version_starts.append((version, len(self.token_ids)))
        self.token_ids += new
        if output.new_logprobs is not None:
            width = 1 + (self.params.logprobs or 0)  # other requests of the step may ask for more
            self.logprobs.append(output.new_logprobs.logprobs[: len(new), :width])
            if width > 1:
                self.logprob_ids.append(output.new_logprobs.logprob_token_ids[: len(new), :width])
        return new, stop

    def add_times(self, output: EngineCoreOutput, at: float) -> None:
        """Note when the request was queued, scheduled and answered; `at`: of these tokens, on the core's clock."""
        if self.times is None:
            return
        for event in output.events or ():
            if event.type == EngineCoreEventType.QUEUED:
                self.times.queued_ts = event.timestamp
            elif event.type == EngineCoreEventType.SCHEDULED and not self.times.scheduled_ts:
                self.times.scheduled_ts = event.timestamp
        self.times.first_token_ts = self.times.first_token_ts or at
        self.times.last_token_ts = at

    def to_output(self, new: Sequence[int], finish_reason: str | None, stop_reason: int | str | None) -> RequestOutput:
        """Return the sampled tokens in vLLM's form; log-probs and versions only with the finished answer."""
        is_finished = finish_reason is not None
        is_delta = self.params.output_kind is RequestOutputKind.DELTA
        ids, logprobs = (
            np.concatenate(parts).ravel().tolist() if is_finished and parts else []
            for parts in (self.logprob_ids, self.logprobs)
        )
        sampled = CompletionOutput(
            index=0,
            text="",
            token_ids=list(new) if is_delta else list(self.token_ids),
            cumulative_logprob=None,
            logprobs=FlatLogprobs(token_ids=ids, logprobs=logprobs),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            weight_versions=self._spans() if is_finished else None,
        )
        name = self.request.external_req_id or self.request.request_id
        return RequestOutput(
            name, None, self.request.prompt_token_ids, None, [sampled], is_finished, metrics=self.times
        )

    def _spans(self) -> list[WeightVersionSpan]:
        ends = [*(start for _, start in self.version_starts[1:]), len(self.token_ids)]
        ends = ends[: len(self.version_starts)]  # an answer without tokens has no span
        spans = zip(self.version_starts, ends, strict=True)
        return [WeightVersionSpan(version, start, end) for (version, start), end in spans]


class CoreThread:
    """The loop of the engine: consumes calls, produces messages of (request, output); waits for calls while idle.

    Only this thread touches vLLM's core. After an exception in a step it answers every call with EngineDeadError.
    """

    def __init__(self, config: VllmConfig, deliver: Deliver, *, is_traced: bool) -> None:
        """Start the thread, which starts the core; the first `call` waits for it."""
        self._config = config
        self._counters = SchedulerCounters("engine") if is_traced else None
        self._deliver = deliver
        self._calls: SimpleQueue[Sequence[Call]] = SimpleQueue()
        self._running: dict[str, RunningRequest] = {}
        self._failure: BaseException | None = None
        self._ends = False
        self._has_ended = False
        self._ending = threading.Lock()  # held while the thread exits or a call is queued
        num_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, args=(num_threads,), name="vllm", daemon=True)
        self._thread.start()

    def put(self, calls: Sequence[Call]) -> None:
        """Queue calls to run between engine steps; once the thread has exited they run here and fail."""
        with self._ending:
            if not self._has_ended:
                self._calls.put(calls)
                return
        for call in calls:
            call()

    def call(self, function: Callable[[EngineCore], ResultT]) -> "tuple[Future[ResultT], Call]":
        """Return a future and the call that resolves it with `function` of the core."""
        future: Future[ResultT] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._failure is not None:
                    raise self._dead()
                future.set_result(function(self._core))
            except BaseException as error:  # raised to the caller, who awaits the future  # noqa: BLE001
                future.set_exception(error)

        return future, run

    def admit(self, answer: RunningRequest) -> None:
        """Start a request. On the core's thread."""
        try:
            if self._failure is not None:
                raise self._dead()
            request, wave = self._core.preprocess_add_request(answer.request)
            self._core.add_request(request, wave)
        except EngineDeadError as error:
            self._deliver([(answer, error)])
        except Exception as error:  # fails this request alone, e.g. an invalid grammar  # noqa: BLE001
            refusal = ValueError(f"{type(error).__name__}: {error}")
            refusal.__cause__ = error
            self._deliver([(answer, refusal)])
        else:
            self._running[answer.request.request_id] = answer

    def abort(self, request_id: str) -> None:
        """End a request that no caller awaits; ignore an unknown one. On the core's thread."""
        if self._running.pop(request_id, None) is not None and self._failure is None:
            self._core.abort_requests([request_id])

    def end(self) -> None:
        """End the loop and all running requests. On the core's thread."""
        self._ends = True

    def join(self, timeout_s: float | None) -> None:
        """Wait for the thread; abandon it after `timeout_s` and fail its requests."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("vLLM's engine thread still running after %g s; abandoning it", timeout_s)
            self._fail(RuntimeError("the engine was closed in a step that does not end"))

    def _run(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        torch._dynamo.config.disable = True  # this thread's: compiling takes longer than it saves
        try:
            with _ONE_AT_A_TIME:
                self._core = _start_core(self._config, log_stats=self._counters is not None)
                self._rng_state = torch.get_rng_state()  # vLLM has seeded it
        except BaseException as error:  # raised to every waiting caller  # noqa: BLE001
            self._fail(error)
        while not self._ends:
            self._make_calls()
            if self._has_work and not self._ends:
                self._guard(self._step)
        self._fail(self._failure or RuntimeError("the engine is closed"))
        with self._ending:
            self._has_ended = True
        while not self._calls.empty():
            for call in self._calls.get():
                call()
        if hasattr(self, "_core"):
            _end_core(self._core)

    def _make_calls(self) -> None:
        """Run all queued calls; wait for one if the model has no work."""
        while not self._ends and (not self._has_work or not self._calls.empty()):
            if self._calls.empty():
                release_openmp_threads()
            for call in self._calls.get():
                self._guard(call)

    def _guard(self, work: Call) -> None:
        """Run work on the core; after an exception every call is answered with EngineDeadError."""
        try:
            with _ONE_AT_A_TIME:
                work()
        except BaseException as error:
            logger.exception("vLLM's engine has failed")
            self._fail(error)

    @property
    def _has_work(self) -> bool:
        return self._failure is None and (self._core.scheduler.has_requests() or bool(self._core.batch_queue))

    def _step(self) -> None:
        with self._own_random_numbers():
            by_client, was_executed = self._core.step_fn()
        self._core.post_step(was_executed)
        for outputs in (by_client or {}).values():
            self._collect(outputs)
        if not was_executed and self._core.scheduler.has_requests():
            time.sleep(IDLE_S)

    @contextlib.contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """Draw from a random state of the engine's own: vLLM uses torch's global generator, as often as the batching of
        requests requires, and the trainer's checkpoints hold that state."""
        trainers = torch.get_rng_state()
        torch.set_rng_state(self._rng_state)
        try:
            yield
        finally:
            self._rng_state = torch.get_rng_state()
            torch.set_rng_state(trainers)

    def _collect(self, outputs: EngineCoreOutputs) -> None:
        messages: list[tuple[RunningRequest, Any]] = []
        stopped: list[str] = []
        if self._counters is not None:
            self._counters.record(outputs.scheduler_stats)
        for output in outputs.outputs:
            answer = self._running.get(output.request_id)
            if answer is None:  # aborted
                continue
            answer.add_times(output, outputs.timestamp)
            new, stop = answer.add(output, outputs.weight_version)
            reason = "stop" if stop is not None else None if output.finish_reason is None else str(output.finish_reason)
            if reason is not None:
                del self._running[output.request_id]
                if output.finish_reason is None:
                    stopped.append(output.request_id)
            if reason is not None or answer.params.output_kind is not RequestOutputKind.FINAL_ONLY:
                messages.append((answer, answer.to_output(new, reason, stop or output.stop_reason)))
        if stopped:
            self._core.abort_requests(stopped)
        if messages:
            self._deliver(messages)

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        failed, self._running = list(self._running.values()), {}
        if failed:
            self._deliver([(answer, self._dead()) for answer in failed])

    def _dead(self) -> EngineDeadError:
        dead = EngineDeadError()
        dead.__cause__ = self._failure
        return dead


class InProcessEngine:
    """As much of vLLM's AsyncLLM as `VllmGeneration` uses, over a `CoreThread`. Use it from one event loop.

    Calls made in one iteration of the event loop arrive together, so that requests sent together are computed as one
    batch from their first step on.
    """

    def __init__(self, config: VllmConfig, *, is_traced: bool = False) -> None:
        """Start the core's thread; `start` waits for it. `is_traced`: outputs have metrics, and counters are kept."""
        self._is_traced = is_traced
        self.vllm_config = config
        self.output_handler = None  # AsyncLLM's task that receives outputs
        self.engine_core = self  # AsyncLLM's client of the core
        self._loop = asyncio.get_running_loop()
        self._renderer = renderer_from_config(config)
        eos = self._renderer.get_eos_token_id()
        self._renderer.get_eos_token_id = lambda: eos  # vLLM asks the tokenizer per request, which takes 30 us
        self._num_requests = 0
        self._inputs = InputProcessor(config, self._renderer)
        self._outbox: list[Call] = []
        self._unfinished: set[str] = set()  # ids of awaited requests
        self._thread = CoreThread(config, self._deliver, is_traced=is_traced)

    async def start(self) -> None:
        """Wait for the core; raises GenerationError with the cause if it does not start."""
        try:
            self._tasks = await self._call(lambda core: core.get_supported_tasks())
        except EngineDeadError as error:
            cause = error.__cause__ or error
            raise GenerationError(f"vLLM did not start: {type(cause).__name__}: {cause}") from cause

    def get_num_unfinished_requests(self) -> int:
        """Return the number of awaited requests."""
        return len(self._unfinished)

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, *, lora_request: LoRARequest | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a request; closing or cancelling it ends the request.

        Raises ValueError or vLLM's own error for a request that vLLM refuses, EngineDeadError.
        """
        request = self._inputs.process_inputs(request_id, prompt, params, self._tasks, lora_request=lora_request)
        self._num_requests += 1  # as vLLM's `assign_request_id`, with a count for its random suffix
        request.external_req_id, request.request_id = request_id, f"{request_id}-{self._num_requests}"
        tokenizer = self._renderer.tokenizer if params.stop else None
        detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request) if params.stop else None
        times = RequestStateStats() if self._is_traced else None
        answer = RunningRequest(request, asyncio.Queue(), detokenizer, times=times)
        self._unfinished.add(request.request_id)
        try:
            self._post(partial(self._thread.admit, answer))
            while request.request_id in self._unfinished:
                output = await answer.outputs.get()
                is_failure = isinstance(output, BaseException)
                if is_failure or output.finished:  # before the yield: the caller may not resume
                    self._unfinished.discard(request.request_id)
                if is_failure:
                    raise output
                yield output
        finally:
            if request.request_id in self._unfinished:
                self._unfinished.discard(request.request_id)
                self._post(partial(self._thread.abort, request.request_id))

    async def pause_generation(self, *, mode: PauseMode = "keep", clear_cache: bool = True) -> None:
        await self.pause_scheduler_async(mode=mode, clear_cache=clear_cache)

    async def pause_scheduler_async(self, *, mode: PauseMode, clear_cache: bool) -> None:
        await self._call(lambda core: core.pause_scheduler(mode, clear_cache))

    async def resume_generation(self) -> None:
        await self._call(lambda core: core.resume_scheduler())

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> list[Any]:
        return await self._call(lambda core: core.collective_rpc(method, None, args))

    async def reset_prefix_cache(self) -> bool:
        return await self._call(lambda core: core.reset_prefix_cache())

    async def reset_encoder_cache(self) -> None:
        await self._call(lambda core: core.reset_encoder_cache())

    async def update_weight_version(self, version: str) -> None:
        await self._call(lambda core: core.set_weight_version(version))

    async def sleep(self, *, level: int) -> None:
        await self._call(lambda core: core.sleep(level))

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await self._call(lambda core: core.wake_up(tags))

    def shutdown(self, timeout: float | None = None) -> None:
        """End the thread within `timeout` seconds; running requests fail. Blocks; may be called on any thread."""
        self._thread.put([self._thread.end])
        self._thread.join(timeout)
        self._renderer.shutdown()

    async def _call(self, function: Callable[[EngineCore], ResultT]) -> ResultT:
        future, call = self._thread.call(function)
        self._post(call)
        return await asyncio.wrap_future(future)

    def _post(self, call: Call) -> None:
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(call)

    def _flush(self) -> None:
        calls, self._outbox = self._outbox, []
        release_openmp_threads()  # the event loop's
        self._thread.put(calls)

    def _deliver(self, messages: list[tuple[RunningRequest, Any]]) -> None:
        """Hand outputs to the event loop. On the core's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(_hand_over, messages)


def _hand_over(messages: list[tuple[RunningRequest, Any]]) -> None:
    for answer, output in messages:
        answer.outputs.put_nowait(output)


def _start_core(config: VllmConfig, *, log_stats: bool) -> EngineCore:
    """Start the core, and undo vLLM's changes to the whole process.

    Its CPU worker replaces torch.set_num_threads, which other code here uses. vLLM makes the extension a base of the
    worker class, which then refuses another engine's extension: this worker gets a class of its own.
    """
    set_num_threads = torch.set_num_threads
    worker_class: Any = resolve_obj_by_qualname(cast(str, config.parallel_config.worker_cls))
    bases = worker_class.__bases__
    try:
        core = EngineCore(config, Executor.get_class(config), log_stats=log_stats)
    finally:
        torch.set_num_threads = set_num_threads  # type: ignore[assignment]
        extensions = worker_class.__bases__[len(bases) :]
        worker_class.__bases__ = bases
    worker = cast(Any, core.model_executor).driver_worker.worker
    worker.__class__ = type(worker_class.__name__, (worker_class, *extensions), {})
    return core


def _end_core(core: EngineCore) -> None:
    """Release the core's resources except torch's process group, which the policy shares.

    `EngineCore.shutdown` would destroy that group.
    """
    core.structured_output_manager.clear_backend()
    core.model_executor.shutdown()
    core.scheduler.shutdown()
    envs.disable_envs_cache()
    gc.unfreeze()
