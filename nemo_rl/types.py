"""Data types of the program, from a prompt to a training batch.

Everything here is a frozen dataclass and holds no tensor: token ids are `tuple[int, ...]`, log-probs
`tuple[float, ...]`; what else an engine decided per token (`TokenColumns`), and pixels (`ImageFeatures`), are in NumPy.
Tensors begin in experience/assembly.py, which makes the `TrainingBatch`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from nemo_rl.image_features import PlacedImage
from nemo_rl.token_columns import NO_COLUMNS, TokenColumns

if TYPE_CHECKING:
    from tensordict import TensorDict

TrainingBatch: TypeAlias = "TensorDict"  # keys, shapes and dtypes: experience/assembly.py

UNKNOWN_TOKEN = -1  # stands for a token that a server did not name; nothing is trained on it
BASE_VERSION = -1  # weight version of an engine's base model, beside the adapters that it holds

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text in a message or in a tool's result."""

    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image in a message or in a tool's result: a file that data/images.py has checked."""

    digest: str  # SHA-256 of the file
    file: bytes = field(default=b"", compare=False, repr=False)  # PNG, JPEG or WebP; empty: read from a record


@dataclass(frozen=True, slots=True)
class ThinkingPart:
    """Reasoning that the assistant wrote before its answer or its calls, without the tags around it."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the assistant requested, in OpenAI's shape."""

    id: str
    name: str
    arguments: str  # a JSON object, as the model wrote it


ContentPart: TypeAlias = TextPart | ImagePart  # content of a user or a tool


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The answer of a tool to one call."""

    call_id: str | None  # None: the client did not say which call it answers
    content: tuple[ContentPart, ...]

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content if isinstance(part, TextPart))


Part: TypeAlias = ContentPart | ThinkingPart | ToolCall | ToolResult
PART_TYPES: Mapping[str, type[Part]] = {
    "text": TextPart,
    "image": ImagePart,
    "thinking": ThinkingPart,
    "tool_call": ToolCall,
    "tool_result": ToolResult,
}


@dataclass(frozen=True, slots=True, init=False)
class Message:
    """A chat message: a role and typed parts in their order.

    Text, thinking, calls and the answered call are views of the parts in OpenAI's shape.

    Example: `Message("assistant", "I add.", (call,))` equals `Message("assistant", (TextPart("I add."), call))`, and
    `Message("tool", "7", tool_call_id="c1")` has the part `ToolResult("c1", (TextPart("7"),))`.
    """

    role: Role
    parts: tuple[Part, ...]

    def __init__(
        self,
        role: Role,
        content: str | Sequence[Part] = "",
        tool_calls: Sequence[ToolCall] = (),
        tool_call_id: str | None = None,
    ) -> None:
        """Make a message of a text or of parts, without empty texts, followed by tool calls.

        Raises TypeError for content that is neither a text nor parts of the types above (a sound, say), and ValueError
        for a tool's result in a message of another role, for a tool's message with thinking or calls but no result, and
        for a `tool_call_id` that no result takes.
        """
        if isinstance(content, str):
            parts: tuple[Part, ...] = (TextPart(content),) if content else ()
        else:
            parts = _check_parts(role, content)
        if role == "tool" and not any(isinstance(part, ToolResult) for part in parts):
            parts = (_make_result(parts, tool_call_id),)
        elif tool_call_id is not None:
            reason = "the parts have a tool's result" if role == "tool" else f"a message of role {role} answers no call"
            raise ValueError(f"tool_call_id {tool_call_id!r:.80}: {reason}")
        object.__setattr__(self, "role", role)
        object.__setattr__(self, "parts", (*parts, *tool_calls) if tool_calls else parts)

    @property
    def content(self) -> str:
        """Return the text, or that of a tool's result, without thinking and calls."""
        if len(self.parts) == 1 and isinstance(only := self.parts[0], TextPart):
            return only.text
        return "".join([part.text for part in self.parts if isinstance(part, (TextPart, ToolResult))])

    @property
    def thinking(self) -> str | None:
        """Return the thinking; None if the message has none."""
        texts = [part.text for part in self.parts if isinstance(part, ThinkingPart)]
        return "\n".join(texts) if texts else None

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return tuple([part for part in self.parts if isinstance(part, ToolCall)])

    @property
    def tool_call_id(self) -> str | None:
        """Return the id of the call that a tool's message answers."""
        return next((part.call_id for part in self.parts if isinstance(part, ToolResult)), None)

    @property
    def images(self) -> tuple[ImagePart, ...]:
        """Return the images in their order, those of tools' results included."""
        contents = (part.content if isinstance(part, ToolResult) else (part,) for part in self.parts)
        return tuple([part for content in contents for part in content if isinstance(part, ImagePart)])

    def without_thinking(self) -> "Message":
        """Return the message as a template renders it that knows no thinking."""
        if not any(isinstance(part, ThinkingPart) for part in self.parts):
            return self
        return Message(self.role, tuple(part for part in self.parts if not isinstance(part, ThinkingPart)))


def _make_result(parts: Sequence[Part], call_id: str | None) -> ToolResult:
    content = []
    for i, part in enumerate(parts):
        if not isinstance(part, TextPart | ImagePart):
            raise ValueError(f"parts[{i}] is a {type(part).__name__} in a tool's message without a ToolResult")
        content.append(part)
    return ToolResult(call_id, tuple(content))


def _check_parts(role: str, parts: Sequence[Part]) -> tuple[Part, ...]:
    known = tuple(PART_TYPES.values())
    if not isinstance(parts, Sequence):
        raise TypeError(f"a message's content is {type(parts).__name__}, not a text or a sequence of parts")
    for i, part in enumerate(parts):
        if not isinstance(part, known):
            raise TypeError(f"parts[{i}] is {part!r:.80}, not one of {', '.join(each.__name__ for each in known)}")
        if isinstance(part, ToolResult) and role != "tool":
            raise ValueError(f"parts[{i}] is a tool's result in a message of role {role}")
    return tuple(part for part in parts if not (isinstance(part, TextPart) and not part.text))


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Sampled tokens `start` to `end` (exclusive) of one completion, drawn under one version of the weights."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TokenizedMessage:
    """A message with the tokens it was sampled or encoded with; they are never made again."""

    message: Message
    token_ids: tuple[int, ...]
    generation_logprobs: tuple[float, ...] | None = None  # one per token; None unless the policy sampled it
    weight_spans: tuple[WeightSpan, ...] = ()  # parts of a completion that an update divided; else empty
    columns: TokenColumns = NO_COLUMNS  # one row per token, as far as engines gave any
    images: tuple[PlacedImage, ...] = ()  # in the order of their tokens
    policy: str = ""  # name in `policies` of the policy that sampled it; empty in a run of one policy

    def __post_init__(self) -> None:
        logprobs = self.generation_logprobs
        if logprobs is not None and len(logprobs) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} tokens with {len(logprobs)} log-probs")
        if self.columns and self.columns.num_tokens != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} tokens with {self.columns}")
        if self.images and max(placed.positions[-1] for placed in self.images) >= len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} tokens with images after them")

    @property
    def is_generated(self) -> bool:
        return self.generation_logprobs is not None


MessageLog: TypeAlias = tuple[TokenizedMessage, ...]  # the only history of a rollout


def placed_images(log: Sequence[TokenizedMessage]) -> tuple[PlacedImage, ...]:
    """Return the images of a history, at their positions among all its tokens."""
    if not any(message.images for message in log):
        return ()
    found: list[PlacedImage] = []
    start = 0
    for message in log:
        found += (placed.shifted(start) for placed in message.images)
        start += len(message.token_ids)
    return tuple(found)


def add_columns(log: Sequence[TokenizedMessage], columns: TokenColumns) -> MessageLog:
    """Return the log with the columns of a request and its response, which cover the log's first tokens.

    Encoded tokens take the request's rows. A sampled token keeps the row of the request that sampled it, and takes one
    if that has none: the last token of a response is computed by the next request.
    """
    if not columns:
        return tuple(log)
    added, start = [], 0
    for message in log:
        own, end = message.columns, start + len(message.token_ids)
        if given := columns.rows(start, end):
            own = own.completed(given) if message.is_generated else given.completed(own)
        added.append(message if own is message.columns else replace(message, columns=own))
        start = end
    return tuple(added)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The start of a rollout: one row of a dataset."""

    prompt_id: str  # unique in its dataset
    task_name: str  # the environment that scores it: a key of `env`
    messages: tuple[Message, ...]
    env_state: Mapping[str, Any] = field(default_factory=dict)  # the environment's data, e.g. the answer
    tools: tuple[Mapping[str, Any], ...] = ()  # OpenAI tool schemas that the chat template renders
    dataset: str = ""  # the dataset's name, for separate metrics
    agent_name: str = ""  # NeMo Gym: the agent that runs it; empty elsewhere

    @property
    def env(self) -> str:
        """Return the environment's name in records and metrics: the agent of NeMo Gym, else the key of `env`."""
        return self.agent_name or self.task_name


GuideKind: TypeAlias = Literal["json_schema", "json_object", "regex", "grammar", "structural_tag"]


@dataclass(frozen=True, slots=True)
class Guide:
    """A constraint on a response: each token is drawn from those that can still lead to a match."""

    kind: GuideKind
    text: str = ""  # the schema as JSON, the expression, the grammar in EBNF, or the tags as JSON


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters by which the next tokens are drawn."""

    max_new_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = -1  # -1: off
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    guide: Guide | None = None  # log-probs are then of the masked distribution
    return_sampling_mask: bool = field(default=False, repr=False)  # record the set that each token is drawn from

    @property
    def needs_sampling_mask(self) -> bool:
        """Return whether sets are recorded: none is smaller than the vocabulary without top-p and top-k."""
        return self.return_sampling_mask and self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)

    def greedy(self) -> "SamplingParams":
        """Return the parameters that take the likeliest token each time."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=-1)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One completion asked of an engine."""

    request_id: str
    token_ids: tuple[int, ...]  # the whole prompt
    sampling: SamplingParams
    seed: int
    session_id: str  # requests of one session stay on one replica, whose cache holds their prefix
    messages: tuple[Message, ...] = ()  # the conversation, for servers that render it; else empty
    tools: tuple[Mapping[str, Any], ...] = ()  # its tools, for the same servers
    images: tuple[PlacedImage, ...] = ()  # images of the prompt
    timeout_s: float = 600.0  # its deadline, from when it is sent (generation/requests.py enforces it)
    # sample under this version if the engine still holds it; None: the newest; BASE_VERSION: without an adapter
    weight_version: int | None = None
    policy: str = ""  # name in `policies` of the policy that samples; empty in a run of one policy
    # called with sampled tokens as they come, and the index of the first; engines that cannot never call it
    on_tokens: Callable[[int, Sequence[int]], None] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class RequestPhases:
    """The seconds of a request in its engine, one phase after another, with the pauses of refits."""

    queue_s: float  # until it is first scheduled
    prefill_s: float  # until its first token
    decode_s: float  # until its last


@dataclass(frozen=True, slots=True)
class Completion:
    """Tokens that an engine sampled for one request."""

    request_id: str
    token_ids: tuple[int, ...]  # the stop token included
    logprobs: tuple[float, ...]  # log-probs of the sampled tokens, after temperature, top-k and top-p
    finish_reason: Literal["stop", "length"]
    weight_versions: tuple[int, int] = (0, 0)  # oldest and newest weights that it was sampled under
    weight_spans: tuple[WeightSpan, ...] = ()  # empty if both are equal; else adjacent, from 0 to the end, oldest first
    text: str | None = None  # a server that returns no tokens: ids are UNKNOWN_TOKEN, as many as it counts
    # a row per token of the prompt, then of the response; the last sampled token was no input: it has no experts
    columns: TokenColumns = NO_COLUMNS
    phases: RequestPhases | None = field(default=None, compare=False)  # if the engine is traced

    @property
    def sampled_columns(self) -> TokenColumns:
        """Return the columns of the sampled tokens alone."""
        count = self.columns.num_tokens
        return self.columns.rows(count - len(self.token_ids), count)


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """A request that an engine could not answer."""

    request_id: str
    cause: str
    timed_out: bool = False  # not answered by its deadline
    is_too_long: bool = False  # the prompt leaves no room for a response; a retry would fail alike


class FailureClass(StrEnum):
    """The boundary at which a rollout failed."""

    INFRA = "infra"  # generation: retried on another replica
    ENVIRONMENT = "environment"
    AGENT = "agent"
    REWARD = "reward"
    CANCELLED = "cancelled"
    TRUNCATED = "truncated"  # cut off before any reward, and `env.<name>.truncated_reward` is null


@dataclass(frozen=True, slots=True)
class Failure:
    """The cause for which a rollout has no reward."""

    failure_class: FailureClass
    cause: str  # one line: the type and text of the first error
    origin: str = field(default="", compare=False, repr=False)  # file:line that raised; empty without an exception
    traceback: str = field(default="", compare=False, repr=False)  # traceback of that exception


@dataclass(frozen=True, slots=True)
class ResponseFault:
    """A scorer's answer to a response that it cannot score, such as one that is too long: a wrong answer."""

    name: str  # as in EnvStep.response_fault


@dataclass(frozen=True, slots=True)
class EnvStep:
    """An environment's answer to one turn."""

    observation: tuple[Message, ...] = ()  # appended to the conversation; empty: nothing
    rewards: Mapping[str, float] = field(default_factory=dict)  # rewards of this turn by name; they add up over turns
    done: bool = True
    state: Mapping[str, Any] = field(default_factory=dict)  # handed back at the next turn
    stop_strings: tuple[str, ...] | None = None  # stop strings of the next turn; None: the run's
    answer: str | None = None  # the parsed answer, for majority votes and tables
    policy: str | None = None  # the policy that gives the next response; None: the one that gave the last
    # rewards of this turn for single policies, by policy and name; `rewards` are those of all
    policy_rewards: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    # the fault that the response caused in its verifier or tool, e.g. "verifier_timeout"; rewards and rollout count
    response_fault: str | None = None


class StopReason(StrEnum):
    """The reason for which a rollout ended."""

    DONE = "done"  # the environment said so
    TRUNCATED = "truncated"  # a response cut by its token limit, or no room left for more
    MAX_TURNS = "max_turns"  # still going after the last turn allowed
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds that one rollout spent."""

    generation_s: float = 0.0
    environment_s: float = 0.0
    total_s: float = 0.0
    scoring_s: float = 0.0  # time of reward models and judges after the rollout; not in total_s


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One rollout that has ended."""

    prompt: Prompt
    group_id: str  # shared by the rollouts that are compared with each other
    generation_index: int  # its place in the group
    message_log: MessageLog
    stop_reason: StopReason
    rewards: Mapping[str, float] = field(default_factory=dict)  # keys: reward names; empty if failed
    answer: str | None = None
    num_turns: int = 0
    weight_versions: tuple[int, int] = (0, 0)  # oldest and newest
    failure: Failure | None = None
    timings: Timings = field(default_factory=Timings)
    other_chains: tuple[MessageLog, ...] = ()  # an agent's further histories, each trained on as a sample of its own
    loss_weight: float = 1.0  # 0: in metrics and in the baseline, but without a gradient
    chain_rewards: tuple[Mapping[str, float], ...] = ()  # given to single chains, one entry each; empty: to none
    response_faults: tuple[str, ...] = ()  # distinct response faults of its turns, in order of appearance
    # rewards of each policy that gave a response, by policy and name; `rewards` are those of the policy that speaks
    # first. Empty if it failed, and in a run of one policy.
    policy_rewards: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.failure is not None) != (self.stop_reason is StopReason.FAILED):
            raise ValueError(f"stop reason {self.stop_reason} with failure {self.failure}")
        if self.failure is not None and self.rewards:
            raise ValueError("a failed rollout has no reward")

    @property
    def reward(self) -> float:
        """Return the sum of the named rewards; only for a rollout that did not fail."""
        if self.failure is not None:
            raise ValueError(f"a failed rollout has no reward: {self.failure.cause}")
        return sum(self.rewards.values())

    def rewards_of_chain(self, index: int) -> Mapping[str, float]:
        """Return the rewards that a chain trains with: the rollout's, if its own do not replace them by name."""
        return {**self.rewards, **self.chain_rewards[index]} if self.chain_rewards else self.rewards

    @property
    def num_generated_tokens(self) -> int:
        return sum(len(m.token_ids) for log in self.chains for m in log if m.is_generated)

    @property
    def num_tokens(self) -> int:
        return sum(len(m.token_ids) for log in self.chains for m in log)

    @property
    def chains(self) -> tuple[MessageLog, ...]:
        """Return all histories to train on; the message log alone if no agent rewrote it."""
        return (self.message_log, *self.other_chains)


@dataclass(frozen=True, slots=True)
class AgentResult:
    """The result of an agent's run; its tokens are the gateway's."""

    rewards: Mapping[str, float] = field(default_factory=dict)  # keys: names; empty if posted or scored later
    answer: str | None = None
    response_fault: str | None = None  # as that of an EnvStep
    # rewards by name for the histories through single calls, by completion id
    call_rewards: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """All rollouts of one prompt, in the order of their generation index; some may have failed."""

    group_id: str
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    baseline: Trajectory | None = None  # the greedy rollout, whose reward the others are compared with; never trained

    @property
    def survivors(self) -> tuple[Trajectory, ...]:
        """Return the rollouts that can be trained on: none if the baseline failed."""
        if self.baseline is not None and self.baseline.failure is not None:
            return ()
        return tuple(t for t in self.trajectories if t.failure is None)

    @property
    def scored(self) -> tuple[Trajectory, ...]:
        """Return the rollouts whose rewards count: the survivors, and the baseline of some."""
        survivors = self.survivors
        return (*survivors, self.baseline) if survivors and self.baseline is not None else survivors


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One flat token sequence to train on. A trajectory yields one, or several if its history was rewritten."""

    trajectory_id: int  # its trajectory's place in the batch
    group_id: int  # its group's place in the batch
    token_ids: tuple[int, ...]  # [T]
    token_mask: tuple[int, ...]  # [T]; 1 where the policy sampled the token
    generation_logprobs: tuple[float, ...]  # [T]; 0 where the mask is 0
    reward: float  # the trajectory's, or its chain's if the chain has its own
    loss_weight: float = 1.0  # 0: in the baseline, but without a gradient (overlong filtering)
    columns: TokenColumns = NO_COLUMNS  # T rows
    images: tuple[PlacedImage, ...] = ()


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A rollout that has ended, as a scorer sees it."""

    messages: tuple[Message, ...]  # role and content, the last response included
    metadata: Mapping[str, Any]  # the prompt's env_state


@dataclass(frozen=True, slots=True)
class CollectedGroups:
    """The groups and metrics that a source hands to one training step."""

    groups: tuple[TrajectoryGroup, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
