"""A refit: weights from the policy to every engine by one of the transports, and the check that they arrived.

The transports through host memory are here: `in_process`, where an engine reads the policy's own tensors,
`shared_memory`, a file that the policy writes and engines on its machine map, and `object_store`, chunks in a cluster's
object store for engines on other machines. Those through device memory: device_memory.py; their choice: transports.py.
"""

import asyncio
import atexit
import errno
import fcntl
import logging
import mmap
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from tensordict import TensorDict

from nemo_rl import batch as keys
from nemo_rl.config.run import WeightSyncConfig
from nemo_rl.distributed.machine import PREFIX, SUFFIX, default_directory, remove_stale_weight_files
from nemo_rl.errors import GenerationError, WeightSyncError
from nemo_rl.interfaces import (
    DeviceTurns,
    Generation,
    HasReplicas,
    LocalWeights,
    Policy,
    WeightChunks,
    WeightEntry,
    WeightManifest,
    Weights,
)
from nemo_rl.types import Completion, GenerationRequest, SamplingParams
from nemo_rl.weight_sync.transports import Transport

logger = logging.getLogger(__name__)

PROBE_TOKENS = 32  # sampled for each probe
PROBE_SAMPLING = SamplingParams(PROBE_TOKENS)
PROBES_TIMEOUT_S = 600.0  # for the engine to answer all of them
ONLY_ENGINE = "engine 0"
ALIGNMENT = 64  # bytes, of tensors in a file or a chunk
CHUNK_BYTES = 64 * 2**20  # in the object store


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Bounds on the differences of log-probs: rounding moves all tokens a little, a few of them far."""

    mean: float
    largest: float

    @classmethod
    def of_mean(cls, mean: float) -> "Tolerance":
        """Return the bounds for `weight_sync.verify_tolerance`."""
        return cls(mean, LARGEST_PER_MEAN * mean)


LARGEST_PER_MEAN = 15.0
FLOAT32 = Tolerance.of_mean(1e-4)
FLOAT32_ON_CUDA = Tolerance.of_mean(5e-3)  # vLLM's attention in Triton multiplies in TF32
LOW_PRECISION = Tolerance.of_mean(0.1)


def default_tolerance(dtype: str, device: str) -> Tolerance:
    """Return the bounds for an engine that computes in `dtype`."""
    if dtype != "float32":
        return LOW_PRECISION
    return FLOAT32_ON_CUDA if device == "cuda" else FLOAT32


async def sample_probes(
    generation: Generation, probes: Sequence[tuple[int, ...]], *, sampling: SamplingParams, weight_version: int
) -> TensorDict:
    """Return `probes` with what the engine samples for them, as the batch that `Policy.logprobs` reads.

    Raises WeightSyncError when the engine does not answer.
    """
    requests = [
        GenerationRequest(f"verify-{weight_version}-{index}", probe, sampling, seed=index, session_id="verify")
        for index, probe in enumerate(probes)
    ]
    return to_logprob_batch(requests, await collect_completions(generation, requests))


def compare_logprobs(batch: TensorDict, logprobs: torch.Tensor, tolerance: Tolerance, *, weight_version: int) -> float:
    """Return the mean difference of the engine's log-probs in `batch` and the policy's, [B, T], on sampled tokens.

    Raises WeightSyncError when the mean or the largest difference is beyond `tolerance`.
    """
    mask = batch[keys.TOKEN_MASK]
    logprobs = logprobs.cpu() * mask
    difference = (logprobs - batch[keys.GENERATION_LOGPROBS]).abs().nan_to_num(nan=torch.inf)  # [B, T]
    mean, largest = float(difference.sum() / mask.sum()), float(difference.max())
    if mean <= tolerance.mean and largest <= tolerance.largest:
        return mean
    probe, position = divmod(int(difference.argmax()), difference.shape[1])
    first = int(mask[probe].argmax())  # sampled token
    raise WeightSyncError(
        f"after the refit to weights {weight_version} the engine's log-probs differ from the policy's by {mean:.3g} on "
        f"average and by up to {largest:.3g} (tolerance {tolerance.mean:.3g} and {tolerance.largest:.3g}, over "
        f"{int(mask.sum())} tokens): probe {probe}, sampled token {position - first} (id "
        f"{int(batch[keys.TOKEN_IDS][probe, position])}), "
        f"engine {float(batch[keys.GENERATION_LOGPROBS][probe, position]):.5f}, "
        f"policy {float(logprobs[probe, position]):.5f}. "
        "Either the engine does not hold these weights, or it computes differently: compare policy.precision with "
        "vllm_cfg.precision, and the names that the policy publishes with the checkpoint's. A difference that is "
        "rounding alone is allowed by weight_sync.verify_tolerance."
    )


async def collect_completions(generation: Generation, requests: Sequence[GenerationRequest]) -> list[Completion]:
    try:
        async with asyncio.timeout(PROBES_TIMEOUT_S):
            answers = {answer.request_id: answer async for answer in generation.generate(requests)}
    except TimeoutError as error:
        raise WeightSyncError(f"the engine did not answer the probes in {PROBES_TIMEOUT_S:g} s") from error
    except GenerationError as error:
        raise WeightSyncError(f"after a refit the engine fails: {error}") from error
    ordered = [answers[request.request_id] for request in requests]
    for answer in ordered:
        if not isinstance(answer, Completion):
            raise WeightSyncError(f"the engine did not answer probe {answer.request_id}: {answer.cause}")
    return [answer for answer in ordered if isinstance(answer, Completion)]


def to_logprob_batch(requests: Sequence[GenerationRequest], completions: Sequence[Completion]) -> TensorDict:
    """Return prompts and completions as the batch that `Policy.logprobs` reads; keys: nemo_rl/batch.py."""
    lengths = [len(r.token_ids) + len(c.token_ids) for r, c in zip(requests, completions, strict=True)]
    size = (len(requests), max(lengths))
    token_ids = torch.zeros(size, dtype=torch.int64)
    token_mask, logprobs = torch.zeros(size), torch.zeros(size)
    for index, (request, completion) in enumerate(zip(requests, completions, strict=True)):
        sampled = slice(len(request.token_ids), lengths[index])
        token_ids[index, : lengths[index]] = torch.tensor(request.token_ids + completion.token_ids)
        token_mask[index, sampled] = 1
        logprobs[index, sampled] = torch.tensor(completion.logprobs)
    return TensorDict(
        {
            keys.TOKEN_IDS: token_ids,
            keys.TOKEN_MASK: token_mask,
            keys.GENERATION_LOGPROBS: logprobs,
            keys.LENGTHS: torch.tensor(lengths),
            keys.SAMPLE_MASK: torch.ones(len(requests)),
        },
        batch_size=[len(requests)],
    )


def engine_replicas(generation: Generation) -> Sequence[Generation]:
    """Return the engines that hold weights of their own: those behind a router, else the engine itself."""
    return generation.replicas if isinstance(generation, HasReplicas) else (generation,)


def engine_names(generation: Generation) -> Sequence[str]:
    """Return the names of `engine_replicas`, in their order."""
    return generation.replica_names if isinstance(generation, HasReplicas) else (ONLY_ENGINE,)


class TransportWeightSync:
    """The refit of all engines by `transport`; None: through a file in shared memory.

    All engines pause, all load, all resume: none samples under the new weights before all have them. The first refit of
    each engine is verified with `probes` (token ids of prompts), on a CPU the first two, since the second repeats what
    was recorded in the first; later ones where `section.verify` says so.
    `dtype` and `device` are those of the engine's computation, `sampling` that of training, whose log-probs the policy
    computes. With `keep_cache` running requests continue with keys and values of the old weights.
    """

    def __init__(
        self,
        probes: Sequence[Sequence[int]],
        section: WeightSyncConfig,
        dtype: str,
        *,
        device: str = "cpu",
        sampling: SamplingParams = PROBE_SAMPLING,
        keep_cache: bool = False,
        transport: Transport | None = None,
    ) -> None:
        self._probes = [tuple(probe) for probe in probes[: section.num_probe_prompts]]
        self._verify_all = section.verify
        wanted = section.verify_tolerance
        self._tolerance = default_tolerance(dtype, device) if wanted is None else Tolerance.of_mean(wanted)
        self._sampling = replace(sampling, max_new_tokens=PROBE_TOKENS)
        self._keep_cache = keep_cache
        self._transport = transport or SharedMemory()
        self._num_first = 2 if device == "cpu" else 1  # refits of an engine that are always verified
        self._num_verified: WeakKeyDictionary[Generation, int] = WeakKeyDictionary()

    async def publish(
        self, policy: Policy, generation: Generation, *, weight_version: int, turns: DeviceTurns | None = None
    ) -> None:
        """Refit the engines; running requests are held meanwhile and continue under the new weights.

        Raises WeightSyncError; the engine then stays paused, since it may hold a part of the new weights.
        """
        async with turns.delivery() if turns else nullcontext():
            staged = await self._transport.stage(policy)
            await generation.pause(keep_cache=self._keep_cache)
            await self._transport.deliver(policy, generation, staged, weight_version)
            del staged  # it may be a copy of all weights
        await generation.resume()
        replicas = engine_replicas(generation)
        unverified = [e for e in replicas if self._verify_all or self._num_verified.get(e, 0) < self._num_first]
        if not unverified:
            return
        if not self._probes:
            logger.warning("no probe prompts: the refit to weights %d is not verified", weight_version)
            return
        await self._verify(policy, unverified, weight_version, turns)
        for engine in unverified:
            self._num_verified[engine] = self._num_verified.get(engine, 0) + 1

    async def _verify(
        self, policy: Policy, engines: Sequence[Generation], weight_version: int, turns: DeviceTurns | None
    ) -> None:
        """Let all engines sample first, then the policy score what they did: the two may share a device."""
        batches = [
            await sample_probes(engine, self._probes, sampling=self._sampling, weight_version=weight_version)
            for engine in engines
        ]
        async with turns.policy_turn("weights") if turns else nullcontext():
            logprobs = [await policy.logprobs(batch) for batch in batches]
        for batch, scored in zip(batches, logprobs, strict=True):
            difference = compare_logprobs(batch, scored, self._tolerance, weight_version=weight_version)
            logger.info("weights %d verified: log-probs differ by %.2g on average", weight_version, difference)

    def close(self) -> None:
        self._transport.close()


class InProcess:
    """The transport `in_process`: the engine copies the policy's own tensors, which nothing changes meanwhile.

    An engine that writes to them would train the policy: torch counts the writes, and one raises WeightSyncError.
    """

    def __init__(self) -> None:
        self._writes: list[int] = []  # to each tensor, before it is delivered

    async def stage(self, policy: Policy) -> LocalWeights:
        weights = LocalWeights(await policy.run_with_weights(tuple))
        self._writes = [tensor._version for _, tensor in weights.tensors]
        return weights

    async def deliver(self, policy: Policy, generation: Generation, staged: Weights, weight_version: int) -> None:
        await generation.update_weights(staged, weight_version)
        assert isinstance(staged, LocalWeights)
        for (name, tensor), writes in zip(staged.tensors, self._writes, strict=True):
            if tensor._version != writes:
                raise WeightSyncError(
                    f"the engine has written to the policy's own {name} while it loaded it; with "
                    "weight_sync.transport: shared_memory it gets a copy"
                )

    def close(self) -> None:
        """Do nothing: it holds no weights."""


class WeightFile:
    """A file that one trainer writes weights to; readers map it after `write` and before the next one.

    It is in `directory` (None: shared memory; the temporary directory where there is none, or when it is full). It is
    locked as long as it is open, and removed by `close`; stale files of killed runs are removed here.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or default_directory()
        remove_stale_weight_files(self._directory)
        self._file, self.path = create_locked_file(self._directory)
        self._capacity = 0  # bytes
        self._bytes = torch.empty(0, dtype=torch.uint8)  # the mapped file

    def write(self, weights: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
        """Copy each tensor into the file, on whatever device it is; raises WeightSyncError when there is no room."""
        entries: list[WeightEntry] = []
        end = 0
        for name, tensor in weights:
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            end = offset + tensor.numel() * tensor.element_size()
            if end > self._capacity:
                self._grow(end + end // 2)
            target = self._bytes[offset:end].view(tensor.dtype).view(tensor.shape)
            target.copy_(tensor.detach())
            entries.append(make_weight_entry(name, tensor, offset))
        return WeightManifest(str(self.path), tuple(entries))

    def _grow(self, capacity: int) -> None:
        """Allocate before mapping: writing to a mapped page for which there is no memory would kill the process."""
        try:
            os.posix_fallocate(self._file, 0, capacity)
        except OSError as error:
            fallback = Path(tempfile.gettempdir())
            if error.errno != errno.ENOSPC or self._directory == fallback:
                raise WeightSyncError(f"no room for {capacity / 2**20:.0f} MiB of weights in {self.path}") from error
            logger.warning("%s is full: weights go through %s, which is slower", self._directory, fallback)
            self._move(fallback)
            self._grow(capacity)
            return
        self._bytes = torch.frombuffer(mmap.mmap(self._file, capacity), dtype=torch.uint8)
        self._capacity = capacity

    def _move(self, directory: Path) -> None:
        file, path = create_locked_file(directory)
        shutil.copyfile(self.path, path)
        self._remove()
        self._directory, self._file, self.path = directory, file, path

    def _remove(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._file)

    def close(self) -> None:
        """Remove the file; may be called twice."""
        if self._file < 0:
            return
        self._remove()
        self._file, self._capacity = -1, 0
        self._bytes = torch.empty(0, dtype=torch.uint8)


def make_weight_entry(name: str, tensor: torch.Tensor, offset: int) -> WeightEntry:
    """Return the entry of a tensor that begins `offset` bytes after the start."""
    return WeightEntry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset)


def create_locked_file(directory: Path) -> tuple[int, Path]:
    """Create a file, locked before it has the name by which others look for stale files."""
    name = f"{PREFIX}{os.getpid()}_{secrets.token_hex(4)}{SUFFIX}"
    unlocked = directory / f".{name}"
    file = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    os.rename(unlocked, directory / name)
    return file, directory / name


_FILES: dict[str, WeightFile] = {}  # open in this process: a policy's, which may not be the driver's


@dataclass(frozen=True, slots=True)
class WriteWeightFile:
    """Writes the weight file `key` of the process that it is called in; the file stays open there. Picklable."""

    key: str = field(default_factory=lambda: secrets.token_hex(8))

    def __call__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
        if self.key not in _FILES:
            _FILES[self.key] = WeightFile()
            atexit.register(close_weight_file, self.key)
        return _FILES[self.key].write(weights)


def close_weight_file(key: str) -> None:
    """Remove the file `key` of this process, if it has it."""
    if file := _FILES.pop(key, None):
        file.close()


class SharedMemory:
    """The transport `shared_memory`: a file that the policy rewrites at each refit and engines on its machine map."""

    def __init__(self) -> None:
        self._write = WriteWeightFile()
        self._path: Path | None = None

    async def stage(self, policy: Policy) -> WeightManifest:
        manifest = await policy.run_with_weights(self._write)
        self._path = Path(manifest.path)
        return manifest

    async def deliver(self, policy: Policy, generation: Generation, staged: Weights, weight_version: int) -> None:
        await generation.update_weights(staged, weight_version)

    def close(self) -> None:
        """Remove the file, whichever process of this machine wrote it."""
        close_weight_file(self._write.key)
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None


@dataclass(frozen=True, slots=True)
class PutWeights:
    """Puts the weights into the object store of the process that it is called in, chunk by chunk. Picklable."""

    name: str
    transfer: int
    chunk_bytes: int = CHUNK_BYTES

    def __call__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> WeightChunks:
        from nemo_rl.distributed.actors import put_bytes  # loads Ray, which a run in one process has no use for

        entries: list[WeightEntry] = []
        chunks: list[object] = []
        parts: list[torch.Tensor] = []
        start = end = 0  # of the chunk, in the file
        for name, tensor in weights:
            content = to_bytes(tensor)
            entries.append(make_weight_entry(name, tensor, end))
            parts += [content, torch.zeros(-len(content) % ALIGNMENT, dtype=torch.uint8)]
            end += len(content) + len(parts[-1])
            if end - start >= self.chunk_bytes:
                chunks.append(put_bytes(torch.cat(parts).numpy()))
                parts, start = [], end
        if parts:
            chunks.append(put_bytes(torch.cat(parts).numpy()))
        return WeightChunks(self.name, self.transfer, tuple(chunks), tuple(entries))


def to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


class ObjectStore:
    """The transport `object_store`: rank 0 puts chunks; one engine of each machine writes them into a file for all."""

    def __init__(self) -> None:
        self._name = f"{PREFIX}node_{secrets.token_hex(8)}{SUFFIX}"
        self._transfer = 0

    async def stage(self, policy: Policy) -> WeightChunks:
        self._transfer += 1
        return await policy.run_with_weights(PutWeights(self._name, self._transfer))

    async def deliver(self, policy: Policy, generation: Generation, staged: Weights, weight_version: int) -> None:
        await generation.update_weights(staged, weight_version)

    def close(self) -> None:
        """Do nothing: the engines remove the files when they end."""
