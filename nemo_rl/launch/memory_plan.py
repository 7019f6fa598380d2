"""The memory plan of a run: expected peaks of each device and host by part, and cures for what does not fit.

memory_report.py makes it of a configuration and prints it. Loads no torch.

FSDP2 keeps 4 bytes a parameter of weights, 4 of gradients and 8 of Adam's state, sharded (ZeRO-3, arXiv 1910.02054),
gathers a layer and its successor in the precision of the computation, and reduces gradients in float32. Activations
follow arXiv 2205.05198, section 4.1, for RMSNorm, SwiGLU and flash attention (arXiv 2307.08691). vLLM takes
`gpu_memory_utilization` of the device (vllm/v1/worker/utils.py, request_memory). tests/unit/launch/test_memory_plan.py
compares the formulas with what the real modules allocate (policy/memory_trace.py). GB are 1e9 bytes.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nemo_rl.launch.model_files import ModelShape

GB = 10**9
CONTEXT_BYTES = 1 * GB  # assumed: of a process on a device: CUDA's context, the libraries' workspaces, NCCL's buffers
SLEEPING_BYTES = 1 * GB  # assumed: what an engine keeps while it sleeps, above all CUDA graphs
PROCESS_BYTES = 4 * GB  # assumed: host memory of a process with torch and its libraries
FRAGMENTATION = 1.05  # assumed: what torch's allocator reserves for each byte in use, with expandable segments
BUCKET_BYTES = 2 * GB  # of a refit, both sides and what is gathered: distributed/tensor_transfer.py has 0.5 GiB each
HEAD_BYTES = 6  # of a logit: in bfloat16 and in float32, which its gradient overwrites
BLOCK_BYTES = 2**28  # of the log-probs' intermediate results: policy/logprobs.py, ACCELERATOR_BLOCK
OPTIMIZER_BYTES = {"SGD": 4, "Adagrad": 4, "RMSprop": 4}  # of state for each trained parameter; others as Adam
ADAM_BYTES = 8
MAX_GPUS = 1024  # that a cure proposes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankModel:
    """A model on ranks that share it: everything that its memory on one of them depends on."""

    shape: ModelShape
    compute_bytes: int = 2  # of a number in forward and backward
    data: int = 1  # ranks that share the samples and, with FSDP2, the weights
    tensor: int = 1
    stages: int = 1
    train_tokens: int = 0  # of one micro-batch
    score_tokens: int = 0  # of one pass without gradients
    longest: int = 1  # tokens of a sample, which no micro-batch can be smaller than
    chunk: int | None = 1024  # positions whose logits exist at once
    recomputes: bool = False  # activation_checkpointing
    is_offloaded: bool = False  # cpu_offload
    is_frozen: bool = False  # a teacher, in its precision
    is_replicated: bool = False  # Megatron: each data-parallel rank holds whole weights and gradients
    is_kept_whole: bool = False  # keep_unsharded: whole weights and gradients for all micro-batches of a step
    adapter_dim: int | None = None
    optimizer_bytes: int = ADAM_BYTES
    has_reference: bool = False

    @property
    def own_parameters(self) -> int:
        """Return the parameters that one rank computes with."""
        return self.shape.parameters // (self.tensor * self.stages)

    @property
    def trained_parameters(self) -> int:
        if self.is_frozen:
            return 0
        shape, dim = self.shape, self.adapter_dim
        return (shape.parameters if dim is None else shape.adapter_parameters(dim)) // (self.tensor * self.stages)

    @property
    def _shards(self) -> int:
        return 1 if self.is_replicated else self.data

    @property
    def weights(self) -> int:
        """Return this rank's weights; Megatron divides its float32 copy over the ranks."""
        own = self.own_parameters
        if self.is_replicated:
            return self.compute_bytes * own + (4 * own // self.data if self.compute_bytes == 2 else 0)
        if self.is_frozen or self.adapter_dim is not None:  # what is frozen is in the precision
            return (self.compute_bytes * own + 4 * self.trained_parameters) // self.data
        return 4 * own // self.data

    @property
    def gradients(self) -> int:
        return 4 * self.trained_parameters // self._shards

    @property
    def optimizer(self) -> int:
        return self.optimizer_bytes * self.trained_parameters // self.data

    @property
    def reference(self) -> int:
        """Return the frozen copy of the initial weights; adapters need none."""
        if not self.has_reference or self.adapter_dim is not None:
            return 0
        return self.compute_bytes * self.own_parameters // self._shards

    @property
    def layer_activations(self) -> int:
        """Return the bytes that a layer keeps of one token for its backward pass, at 2 bytes a number.

        Two norms keep a float32 copy of their input, the normalized values and their output; attention keeps queries,
        keys, values, its output and a log-sum-exp a head; the MLP four vectors of its width.
        Example: Qwen2.5-1.5B: 2 x 8 x 1536 + 2 x (2 x 1536 + 2 x 256) + 4 x 12 + 8 x 8960 = 103,472.
        """
        shape, size = self.shape, self.compute_bytes
        norms = 2 * (4 + 2 * size) * shape.hidden_size
        attention = size * (2 * shape.query_width + 2 * shape.key_value_width) + 4 * shape.num_attention_heads
        return norms + (attention + 4 * size * shape.intermediate_size) // self.tensor

    @property
    def activations(self) -> int:
        """Return what a micro-batch keeps between forward and backward."""
        layers, tokens = self._own_layers, self.train_tokens
        if not self.recomputes:
            return layers * tokens * self.layer_activations
        return layers * tokens * self.compute_bytes * self.shape.hidden_size + tokens * self.layer_activations

    @property
    def training_gathered(self) -> int:
        """Return whole weights and gradients of a backward pass at its worst moment, and the logits of a chunk.

        At the output layer: the root's weights, the gradient of its matrix and its sum, and two layers on their way; in
        the layers: two of them gathered, a gradient, and its float32 copy for the reduction; at the end the root's.
        """
        size, layer = self.compute_bytes, self.shape.layer_parameters // self.tensor
        root, head = self._root, self.shape.head_parameters // self.tensor
        logits = self._logits_bytes(HEAD_BYTES)
        at_head = size * root + max(logits + size * head, self._logits_bytes(size) + 2 * size * head) + 3 * size * layer
        in_layers = size * (root + head) + (3 * size + 4) * layer
        if self.adapter_dim is not None:
            return size * root + logits + 3 * size * layer
        if self.is_kept_whole:
            return (size + 4) * self.own_parameters + logits + 2 * size * head + (2 * size + 4) * layer + BLOCK_BYTES
        at_end = (2 * size + 4) * root + 4 * layer
        return max(at_head, in_layers, at_end) + BLOCK_BYTES

    @property
    def scoring_temporary(self) -> int:
        """Return gathered weights, logits and activations of a pass without gradients."""
        size, layer = self.compute_bytes, self.shape.layer_parameters // self.tensor
        widths = 4 * self.shape.hidden_size * 2 + 3 * size * self.shape.intermediate_size // self.tensor
        logits = self._logits_bytes(HEAD_BYTES) + 2 * BLOCK_BYTES
        gathered = 0 if self.is_frozen and self.data == 1 else size * self._root + 2 * size * layer
        copies = size * self._root + 2 * size * layer if self.data > 1 else 0  # buffers of the first all-gathers
        return gathered + max(copies, logits) + self.score_tokens * widths

    @property
    def _own_layers(self) -> int:
        return math.ceil(self.shape.num_hidden_layers / self.stages)

    @property
    def _root(self) -> int:
        return self.shape.root_parameters // self.tensor

    def _logits_bytes(self, size: int) -> int:
        tokens = max(self.train_tokens, self.score_tokens)
        return size * min(self.chunk or tokens, tokens) * self.shape.vocab_size // self.tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """An engine of one or several GPUs."""

    shape: ModelShape
    utilization: float  # of each device
    gpus: int = 1
    weight_bytes: int = 2
    max_model_len: int = 512
    sleeps: bool = True
    has_own_process: bool = True  # False: it is in the driver's (hf, and vLLM's in_process on a CPU)

    @property
    def weights(self) -> int:
        return self.weight_bytes * self.shape.parameters // self.gpus

    @property
    def smallest(self) -> int:
        """Return the least that it starts with: weights, and keys and values of one longest sequence."""
        return self.weights + self.shape.cache_bytes(self.max_model_len, self.weight_bytes) // self.gpus + CONTEXT_BYTES


@dataclass(frozen=True, slots=True)
class Moment:
    """The parts that are on a device, or on a host, at the same time."""

    name: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {size / GB:.1f}" for name, size in self.parts.items() if size >= GB / 20)
        return f"{self.name}: {self.total / GB:.1f} GB ({shown})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMemory:
    """The models of a run, and how they share devices of `capacity` bytes."""

    capacity: int
    policy: RankModel
    engine: EngineModel | None = None  # None: supervised training
    teachers: Mapping[str, RankModel] = field(default_factory=dict)
    shares_device: bool = False  # policy and engine
    shared_teachers: frozenset[str] = frozenset()  # that take turns with the policy
    ranks_per_node: int = 1
    engines_per_node: int = 1
    saves: bool = True  # checkpoints

    def devices(self) -> dict[str, list[Moment]]:
        """Return the moments of each kind of device."""
        if self.shares_device:
            return {"policy and engine": self._shared_moments(), **self._own_teachers()}
        found = {"policy": self._policy_moments()}
        if self.engine is not None:
            found["engine"] = [Moment("generation", self._awake)]
        return found | self._own_teachers()

    def host(self) -> Moment:
        """Return the memory of a node's processes at their largest."""
        policy, ranks = self.policy, self.ranks_per_node
        moved = policy.weights + policy.optimizer + policy.reference
        is_away = (self.shares_device and self._engine_sleeps) or policy.is_offloaded or bool(self.shared_teachers)
        engines = self.engines_per_node if self.engine and self.engine.has_own_process else 0
        parts = {
            "processes": PROCESS_BYTES * (1 + ranks + engines),
            "offloaded policy": ranks * moved * is_away,
            "offloaded teachers": ranks * sum(self.teachers[key].weights for key in self.shared_teachers),
        }
        if self.saves:
            saved = policy.adapter_dim is None
            parts["checkpoint"] = 4 * policy.shape.parameters * saved + ranks * policy.optimizer
        return Moment("host", parts)

    @property
    def _engine_sleeps(self) -> bool:
        return self.engine is not None and self.engine.sleeps

    @property
    def _awake(self) -> dict[str, int]:
        assert self.engine is not None
        budget = int(self.engine.utilization * self.capacity)
        weights = self.engine.weights
        return {
            "engine weights": weights,
            "KV cache and engine activations": max(budget, self.engine.smallest) - weights,
        }

    def _resident(self) -> dict[str, int]:
        policy = self.policy
        if policy.is_offloaded:
            return {"reference": 0}
        return {"weights": policy.weights, "optimizer": policy.optimizer, "reference": policy.reference}

    def _training(self) -> dict[str, int]:
        policy = self.policy
        working = policy.activations + policy.training_gathered
        return {
            **self._resident(),
            "gradients": policy.gradients * (not policy.is_offloaded),
            "activations": policy.activations,
            "gathered weights and logits": policy.training_gathered,
            "allocator": int((FRAGMENTATION - 1) * (working + policy.weights + policy.gradients + policy.optimizer)),
        }

    def _scoring(self) -> dict[str, int]:
        return {**self._resident(), "scoring": int(FRAGMENTATION * self.policy.scoring_temporary)}

    def _policy_moments(self) -> list[Moment]:
        context = {"context": CONTEXT_BYTES}
        teachers = [
            Moment(f"scoring of {key}", {**context, key: self.teachers[key].weights,
                                         "scoring": self.teachers[key].scoring_temporary})
            for key in sorted(self.shared_teachers)
        ]  # fmt: skip
        return [
            *teachers,
            Moment("log-probs", self._scoring() | context),
            Moment("training", self._training() | context),
        ]

    def _shared_moments(self) -> list[Moment]:
        """Return the moments of a device that policy and engine share, in turns where the engine sleeps."""
        assert self.engine is not None
        policy, engine = self.policy, self.engine
        contexts = {"contexts": 2 * CONTEXT_BYTES}
        asleep = {"sleeping engine": SLEEPING_BYTES} if engine.sleeps else self._awake
        started = {"weights": policy.weights * (not policy.is_offloaded), "reference": policy.reference}
        # The first refit comes while the engine is awake as a whole; the reference is away by then.
        first = {"reference or transport": max(policy.reference, self.transport)}
        moments = [Moment("start", {**self._awake, "weights": started["weights"], **first, **contexts})]
        if engine.sleeps:
            refit = {"weights": started["weights"], "engine weights": engine.weights, "transport": self.transport}
            moments += [
                Moment("generation", self._awake | {"context": CONTEXT_BYTES}),
                Moment("refit", refit | {"sleeping engine": SLEEPING_BYTES} | contexts),
            ]
        own = [Moment(each.name, {**asleep, **each.parts}) for each in self._policy_moments()]
        return moments + own

    @property
    def transport(self) -> int:
        """Return what a refit holds besides both weights: buckets, or the largest tensor on both sides."""
        policy = self.policy
        return max(BUCKET_BYTES, 2 * policy.compute_bytes * policy.shape.head_parameters)

    def _own_teachers(self) -> dict[str, list[Moment]]:
        context = {"context": CONTEXT_BYTES}
        return {
            key: [Moment("scoring", {**context, "weights": model.weights, "scoring": model.scoring_temporary})]
            for key, model in self.teachers.items()
            if key not in self.shared_teachers
        }

    def problems(self) -> list[str]:
        """Return what does not fit on a device."""
        found = [
            f"{moment.name} needs {moment.total / GB:.1f} of {self.capacity / GB:.0f} GB ({device})"
            for device, moments in self.devices().items()
            for moment in moments
            if moment.total > self.capacity
        ]
        engine = self.engine
        if engine is not None and 0 < engine.utilization * self.capacity < engine.smallest:
            found.append(
                f"the engine needs {engine.smallest / GB:.1f} GB for weights and one sequence, and has "
                f"{engine.utilization:g} of {self.capacity / GB:.0f} GB"
            )
        return found


Change = Callable[[RunMemory], RunMemory]


def find_cure(memory: RunMemory) -> str:
    """Return the nearest change with which everything fits: a single one if there is one, else several together."""
    kinds = [kind for kind in _cures(memory) if kind]
    for text, change in (one for kind in kinds for one in kind):
        if not change(memory).problems():
            return text
    chosen: list[tuple[str, Change]] = []
    for kind in kinds:
        last = next((one for one in kind if not _changed(memory, [*chosen, one]).problems()), kind[-1])
        chosen.append(last)
        if not _changed(memory, chosen).problems():
            break
    else:
        return "no change of this configuration is enough"
    for one in list(chosen):
        others = [other for other in chosen if other is not one]
        if not _changed(memory, others).problems():
            chosen = others
    return " and ".join(text for text, _ in chosen)


def _changed(memory: RunMemory, changes: Sequence[tuple[str, Change]]) -> RunMemory:
    for _, change in changes:
        memory = change(memory)
    return memory


def _cures(memory: RunMemory) -> Iterator[list[tuple[str, Change]]]:
    """Yield the changes of each kind, the smallest first: from those that cost little speed to those that need GPUs."""
    policy, engine = memory.policy, memory.engine
    if engine is not None:
        shares = [n / 100 for n in range(95, 0, -5) if engine.smallest <= n / 100 * memory.capacity]
        key = "policy.generation.vllm_cfg.gpu_memory_utilization"
        yield [(f"{key}: {share:g}", _with_utilization(share)) for share in shares if share < engine.utilization]
    sizes = [policy.train_tokens // 2**n for n in range(1, 20)]
    yield [
        (f"micro-batches of {n} tokens", _with_policy(train_tokens=n, score_tokens=n))
        for n in sizes
        if n >= policy.longest
    ]
    if not policy.recomputes:
        yield [("activation_checkpointing: true", _with_policy(recomputes=True))]
    if not policy.is_offloaded and not policy.is_replicated:
        yield [("policy.dtensor_cfg.cpu_offload: true", _with_policy(is_offloaded=True))]
    if engine is not None:
        yield [(f"{engine.gpus * n} GPUs for an engine", _with_engine_gpus(engine.gpus * n)) for n in (2, 4, 8)]
    gpus = policy.data * policy.tensor * policy.stages
    factors = [2**n for n in range(1, 11) if gpus * 2**n <= MAX_GPUS]
    yield [(f"{gpus * n} GPUs for the policy", _with_policy(data=policy.data * n)) for n in factors]


def _with_policy(**values: Any) -> Change:
    return lambda memory: replace(memory, policy=replace(memory.policy, **values))


def _with_utilization(share: float) -> Change:
    return lambda memory: replace(memory, engine=memory.engine and replace(memory.engine, utilization=share))


def _with_engine_gpus(number: int) -> Change:
    return lambda memory: replace(memory, engine=memory.engine and replace(memory.engine, gpus=number))
