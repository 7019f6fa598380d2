"""One rollout as a pure state machine: generate, append, score, observe, stop.

All semantics of a rollout live here, without I/O or asyncio. The schedulers of rollouts.py carry out the `action` that
an `Episode` asks for and hand it the result; they differ only in when they do so.
"""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nemo_rl.config.images import MAX_CONVERSATION_IMAGES
from nemo_rl.data.chat import ChatEncoder, flat_token_ids
from nemo_rl.environments.boundary import RESPONSE_TRUNCATED, error_to_failure
from nemo_rl.environments.states import copy_state
from nemo_rl.token_columns import NO_COLUMNS
from nemo_rl.types import (
    Completion,
    EnvStep,
    Failure,
    FailureClass,
    GenerationRequest,
    ImagePart,
    Message,
    MessageLog,
    Part,
    Prompt,
    SamplingParams,
    StopReason,
    TextPart,
    Timings,
    TokenizedMessage,
    ToolCall,
    ToolResult,
    Trajectory,
    WeightSpan,
    add_columns,
    placed_images,
)

SURROGATE = re.compile("[\ud800-\udfff]")
TRUNCATED_BEFORE_REWARD = "truncated_before_reward"  # a response fault
OVERLONG_PROMPT = "overlong_prompt"  # a response fault


@dataclass(frozen=True, slots=True)
class RolloutJob:
    prompt: Prompt
    group_id: str
    generation_index: int  # its place in the group
    epoch: int = 0
    attempt: int = 0  # 1: its group was begun for an earlier step, and deferred
    is_greedy: bool = False  # the baseline of its group

    def sampling_of(self, sampling: SamplingParams) -> SamplingParams:
        """Return the parameters by which it samples, given those of the run."""
        return sampling.greedy() if self.is_greedy else sampling


@dataclass(frozen=True, slots=True)
class TurnRules:
    """The rules that the rollouts of a run have in common."""

    max_turns: int
    max_total_length: int  # tokens of prompt, responses and observations together
    sampling: SamplingParams  # `max_new_tokens` and `stop_strings` as configured; both vary by turn
    seed: int  # the run's seed
    generation_timeout_s: float = 600.0  # deadline of a request
    # reward by task of a rollout that is cut off before any; None: it fails. Absent: scorers alone give rewards
    truncated_rewards: Mapping[str, float | None] = field(default_factory=dict)
    # by task: the policies that speak in its rollouts, that of the first response first; empty: a run of one policy
    speakers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    policy_versions: Mapping[str, int] = field(default_factory=dict)  # of policies that are versions of one adapter


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt's tokens, made once for all rollouts of its group."""

    message_log: MessageLog
    token_ids: tuple[int, ...]
    conversation: tuple[Message, ...]  # as environments see it


@dataclass(frozen=True, slots=True)
class EnvironmentCall:
    """One item of a call of the prompt's environment."""

    conversation: tuple[Message, ...]  # role and content alone
    state: Mapping[str, Any]  # the environment's own, and RESPONSE_TRUNCATED


def encode_prompt(prompt: Prompt, encoder: ChatEncoder) -> EncodedPrompt | Failure:
    """Encode a prompt, or return why the chat template cannot render it."""
    try:
        message_log = encoder.encode_prompt(prompt.messages, prompt.tools)
    except Exception as error:  # a template may raise anything about messages that it does not expect  # noqa: BLE001
        return error_to_failure(error, prefix=f"prompt {prompt.prompt_id} cannot be encoded")
    conversation = tuple(strip_tool_fields(message) for message in prompt.messages)
    return EncodedPrompt(tuple(message_log), flat_token_ids(message_log), conversation)


def request_seed(seed: int, job: RolloutJob, turn: int) -> int:
    """Return the seed of one request: a stable 63-bit hash, equal in every process and on every machine."""
    parts = [seed, job.epoch, job.prompt.prompt_id, job.generation_index, turn, *([job.attempt] if job.attempt else [])]
    identity = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest()) >> 1


class Episode:
    """A rollout in flight.

    `action` is what it waits for: a GenerationRequest, answered through `apply_response`, or an EnvironmentCall,
    answered through `apply_env_step`. It is None once the rollout has ended; then `trajectory` gives the result.

    A turn is a response and the environment's answer to it. After it the rollout ends as
    - truncated, if the token limit cut the response (it is scored all the same),
    - done, if the environment says so,
    - at its turn limit, if that was the last turn allowed,
    - truncated, if the observation leaves no room for a token; what fits of it is kept.
    The observation of the last turn is kept as text without tokens, since nothing is generated from it.
    Cut off before any reward, at its turn limit or truncated, it has the `truncated_rewards` of the rules. A failure
    ends it at once, without any reward.

    With several `speakers` the environment says which policy gives the next response, and what single policies earn.
    """

    def __init__(
        self, job: RolloutJob, prompt: EncodedPrompt | Failure, encoder: ChatEncoder, rules: TurnRules
    ) -> None:
        self.job = job
        self.action: GenerationRequest | EnvironmentCall | None = None
        self._encoder = encoder
        self._rules = rules
        self._message_log: list[TokenizedMessage] = []
        self._conversation: list[Message] = []  # as environments see it
        self._context: tuple[int, ...] = ()  # the prompt of the last response
        self._response: tuple[int, ...] = ()
        self._state: Mapping[str, Any] = {}
        self._stop_strings = rules.sampling.stop_strings
        self._response_truncated = False
        self._num_turns = 0
        self._speakers = rules.speakers.get(job.prompt.task_name, ())
        self._policy = self._first_policy  # gives the next response
        self._rewards: dict[str, float] = {}  # of all policies
        self._policy_rewards: dict[str, dict[str, float]] = {}  # of single policies, beside `_rewards`
        self._answer: str | None = None
        self._response_faults: dict[str, None] = {}  # an ordered set
        self._columns = NO_COLUMNS  # the last request's that has any
        self._weight_versions: tuple[int, int] | None = None
        self._stop_reason: StopReason | None = None
        self._failure: Failure | None = None
        self._generation_s = 0.0
        self._environment_s = 0.0
        self._begin(prompt)

    def apply_response(self, result: Completion | Failure, *, seconds: float = 0.0) -> None:
        """Append the response and request its score; `seconds` is its generation time."""
        request = self.action
        assert isinstance(request, GenerationRequest)
        self._generation_s += seconds
        if isinstance(result, Failure):
            self._end(StopReason.FAILED, result)
            return
        if problem := _find_response_problem(result, request):
            self.fail(FailureClass.INFRA, problem)
            return
        text = self._encoder.decode(result.token_ids) if result.text is None else replace_surrogates(result.text)
        message = Message("assistant", text)
        sampled = result.token_ids, result.logprobs, result.weight_spans, result.sampled_columns
        self._message_log.append(TokenizedMessage(message, *sampled, policy=self._policy))
        self._columns = result.columns or self._columns
        self._conversation.append(message)
        self._response = result.token_ids
        self._response_truncated = result.finish_reason == "length"
        self._num_turns += 1
        oldest, newest = self._weight_versions or result.weight_versions
        self._weight_versions = (min(oldest, result.weight_versions[0]), max(newest, result.weight_versions[1]))
        state = {**self._state, RESPONSE_TRUNCATED: self._response_truncated}
        self.action = EnvironmentCall(tuple(self._conversation), state)

    def apply_env_step(self, result: EnvStep | Failure, *, seconds: float = 0.0) -> None:
        """Add the rewards of the turn, then continue or end. `seconds` is how long the environment took."""
        assert isinstance(self.action, EnvironmentCall)
        self._environment_s += seconds
        if isinstance(result, Failure):
            self._end(StopReason.FAILED, result)
            return
        if problem := self._find_speaker_problem(result):
            self.fail(FailureClass.ENVIRONMENT, problem)
            return
        _add_rewards(self._rewards, result.rewards)
        for policy, rewards in result.policy_rewards.items():
            _add_rewards(self._policy_rewards.setdefault(policy, {}), rewards)
        self._policy = self._policy if result.policy is None else result.policy
        if result.answer is not None:
            self._answer = result.answer
        if result.response_fault is not None:
            self._response_faults[result.response_fault] = None
        self._state = {key: value for key, value in result.state.items() if key != RESPONSE_TRUNCATED}
        self._stop_strings = self._rules.sampling.stop_strings if result.stop_strings is None else result.stop_strings
        observation = [_replace_surrogates_in(message) for message in result.observation]
        if reason := self._reason_to_stop(result):
            self._message_log += (TokenizedMessage(message, ()) for message in observation)
            self._end(reason)
        else:
            self._observe(observation)

    def will_observe(self, step: EnvStep) -> bool:
        """Return whether the next response is requested after this answer of the environment, if there is room."""
        return self._reason_to_stop(step) is None

    def fail(self, failure_class: FailureClass, cause: str) -> None:
        """End without a reward; `cause` is one line."""
        self._end(StopReason.FAILED, Failure(failure_class, cause))

    def trajectory(self, *, total_s: float = 0.0) -> Trajectory:
        """Return the result, once `action` is None; `total_s` is how long the rollout took."""
        assert self._stop_reason is not None
        policy_rewards = {} if self._failure else self._rewards_by_policy()
        return Trajectory(
            prompt=self.job.prompt,
            group_id=self.job.group_id,
            generation_index=self.job.generation_index,
            message_log=add_columns(self._message_log, self._columns),
            stop_reason=self._stop_reason,
            rewards={} if self._failure else policy_rewards.get(self._first_policy, self._rewards),
            answer=self._answer,
            num_turns=self._num_turns,
            weight_versions=self._weight_versions or (0, 0),
            failure=self._failure,
            timings=Timings(self._generation_s, self._environment_s, total_s),
            response_faults=tuple(self._response_faults),
            policy_rewards=policy_rewards,
        )

    @property
    def _first_policy(self) -> str:
        return self._speakers[0] if self._speakers else ""

    def _rewards_by_policy(self) -> dict[str, dict[str, float]]:
        """Return the rewards of each policy that gave a response; {} in a run of one policy."""
        spoke = dict.fromkeys(m.policy for m in self._message_log if m.is_generated and m.policy)
        return {name: _sum_of(self._rewards, self._policy_rewards.get(name, {})) for name in spoke}

    def _find_speaker_problem(self, step: EnvStep) -> str | None:
        """Return which policy the environment names that does not speak in its rollouts, or None."""
        named = (*([] if step.policy is None else [step.policy]), *step.policy_rewards)
        unknown = next((name for name in named if name not in self._speakers), None)
        if unknown is None:
            return None
        task = self.job.prompt.task_name
        known = ", ".join(self._speakers) or "none: the run has a single policy"
        return f"the environment names the policy {unknown!r:.80}; those of env.{task}.policies: {known}"

    def _begin(self, prompt: EncodedPrompt | Failure) -> None:
        if isinstance(prompt, Failure):
            self._end(StopReason.FAILED, prompt)
            return
        self._message_log += prompt.message_log
        self._conversation += prompt.conversation
        self._context = prompt.token_ids
        self._state = copy_state(self.job.prompt.env_state)  # an environment may change it in place
        length, limit = len(prompt.token_ids), self._rules.max_total_length
        if length >= limit:
            self.fail(FailureClass.ENVIRONMENT, f"a prompt of {length} tokens leaves no room in {limit}")
        else:
            self._request_response()

    def _request_response(self) -> None:
        images = placed_images(self._message_log)
        if len(images) > MAX_CONVERSATION_IMAGES:
            problem = f"the conversation has {len(images)} images, more than {MAX_CONVERSATION_IMAGES}"
            self.fail(FailureClass.ENVIRONMENT, problem)
            return
        job, sampling = self.job, self.job.sampling_of(self._rules.sampling)
        max_new_tokens = min(sampling.max_new_tokens, self._rules.max_total_length - len(self._context))
        if max_new_tokens != sampling.max_new_tokens or self._stop_strings != sampling.stop_strings:
            sampling = replace(sampling, max_new_tokens=max_new_tokens, stop_strings=self._stop_strings)
        session_id = f"{job.group_id}:{job.generation_index}"
        self.action = GenerationRequest(
            request_id=f"{session_id}:{self._num_turns}",
            token_ids=self._context,
            sampling=sampling,
            seed=request_seed(self._rules.seed, job, self._num_turns),
            session_id=session_id,
            messages=tuple(m.message for m in self._message_log) if self._encoder.is_rendered_by_server else (),
            tools=job.prompt.tools if self._encoder.is_rendered_by_server else (),
            images=images,
            timeout_s=self._rules.generation_timeout_s,
            **self._requested_policy(),
        )

    def _requested_policy(self) -> dict[str, Any]:
        """Return the policy that samples the next response, under the weights of the last one unless it has its own."""
        if (own := self._rules.policy_versions.get(self._policy)) is not None:
            return {"weight_version": own}
        version = None if self._weight_versions is None else self._weight_versions[1]
        return {"weight_version": version, "policy": self._policy}

    def _reason_to_stop(self, step: EnvStep) -> StopReason | None:
        if self._response_truncated:
            return StopReason.TRUNCATED
        if step.done:
            return StopReason.DONE
        return StopReason.MAX_TURNS if self._num_turns >= self._rules.max_turns else None

    def _observe(self, observation: Sequence[Message]) -> None:
        """Append the observation, and request the next response if there is room for one."""
        try:
            bridge = self._encode_turn(observation)
        except Exception as error:  # a chat template may raise anything about a message that it does not expect  # noqa: BLE001
            self._end(StopReason.FAILED, observation_failure(error))
            return
        room = self._rules.max_total_length - len(self._context) - len(self._response)
        if sum(len(m.token_ids) for m in bridge) >= room:
            self._message_log += _truncate_messages(bridge, room)
            self._end(StopReason.TRUNCATED)
            return
        self._message_log += bridge
        self._conversation += (strip_tool_fields(m) for m in observation)
        self._context = (*self._context, *self._response, *flat_token_ids(bridge))
        self._request_response()

    def _encode_turn(self, observation: Sequence[Message]) -> MessageLog:
        """Encode the observation; without one the next response continues the last."""
        if not observation:
            return ()
        return tuple(self._encoder.encode_turn(tuple(self._message_log), observation, self.job.prompt.tools))

    def _end(self, reason: StopReason, failure: Failure | None = None) -> None:
        task, rewards = self.job.prompt.task_name, self._rules.truncated_rewards
        has_reward = bool(self._rewards or self._policy_rewards)
        if reason in (StopReason.TRUNCATED, StopReason.MAX_TURNS) and not has_reward and task in rewards:
            self._response_faults[TRUNCATED_BEFORE_REWARD] = None
            if (reward := rewards[task]) is None:
                reason, failure = StopReason.FAILED, truncated_failure(task)
            else:
                self._rewards[task] = reward
        self.action = None
        self._stop_reason = reason
        self._failure = failure


def _add_rewards(total: dict[str, float], rewards: Mapping[str, float]) -> None:
    for name, value in rewards.items():
        total[name] = total.get(name, 0.0) + float(value)


def _sum_of(rewards: Mapping[str, float], own: Mapping[str, float]) -> dict[str, float]:
    total = dict(rewards)
    _add_rewards(total, own)
    return total


def observation_failure(error: Exception) -> Failure:
    """Return the failure of a rollout whose environment answers with what cannot be encoded."""
    return error_to_failure(error, prefix="an observation cannot be encoded")


def truncated_failure(task: str) -> Failure:
    """Return the failure of a rollout that is cut off before any reward."""
    cause = f"cut off by a limit before any reward, and env.{task}.truncated_reward is null"
    return Failure(FailureClass.TRUNCATED, cause)


def make_overlong_trajectory(job: RolloutJob, reward: float | None) -> Trajectory:
    """Return the rollout of a prompt that is too long to be sampled from: truncated, with `reward`; None: it fails."""
    prompt, task = job.prompt, job.prompt.task_name
    return Trajectory(
        prompt=prompt,
        group_id=job.group_id,
        generation_index=job.generation_index,
        message_log=tuple(TokenizedMessage(message, ()) for message in prompt.messages),
        stop_reason=StopReason.TRUNCATED if reward is not None else StopReason.FAILED,
        rewards={} if reward is None else {task: reward},
        failure=None if reward is not None else truncated_failure(task),
        response_faults=(OVERLONG_PROMPT,),
    )


def strip_tool_fields(message: Message) -> Message:
    """Return a message as environments and scorers see it: UTF-8 text, without tool calls."""
    if message.tool_calls or message.tool_call_id is not None:
        message = Message(message.role, (TextPart(message.content), *message.images))
    return _replace_surrogates_in(message)


def replace_surrogates(text: str) -> str:
    """Return text that UTF-8 can encode: half a surrogate pair, which no tokenizer takes, becomes U+FFFD."""
    return text if text.isascii() else SURROGATE.sub("\ufffd", text)


def _replace_surrogates_in(message: Message) -> Message:
    parts = tuple(map(_replace_in_part, message.parts))
    return message if parts == message.parts else Message(message.role, parts)


def _replace_in_part(part: Part) -> Part:
    if isinstance(part, ToolCall):
        return replace(part, arguments=replace_surrogates(part.arguments))
    if isinstance(part, ImagePart):
        return part
    if isinstance(part, ToolResult):
        content = tuple(
            each if isinstance(each, ImagePart) else replace(each, text=replace_surrogates(each.text))
            for each in part.content
        )
        return replace(part, content=content)
    return replace(part, text=replace_surrogates(part.text))


def _truncate_messages(messages: MessageLog, room: int) -> list[TokenizedMessage]:
    """Return the messages with their first `room` tokens; messages after these keep their text alone."""
    kept = []
    for message in messages:
        token_ids = message.token_ids[: max(room, 0)]
        images = tuple(placed for placed in message.images if placed.positions[-1] < room)
        room -= len(token_ids)
        kept.append(replace(message, token_ids=token_ids, images=images))
    return kept


def _find_response_problem(result: Completion, request: GenerationRequest) -> str | None:
    """Return how an engine broke its contract, or None."""
    count, limit = len(result.token_ids), request.sampling.max_new_tokens
    if count != len(result.logprobs):
        return f"the engine gave {count} tokens with {len(result.logprobs)} log-probs"
    if count > limit:
        return f"the engine gave {count} tokens where {limit} were allowed"
    if result.text is None and (num_missing := sum(map(math.isnan, result.logprobs))):  # a server's text has none
        return f"the engine gave {num_missing} of {count} log-probs as NaN"
    if result.columns and result.columns.num_tokens != len(request.token_ids) + count:
        return f"the engine gave {result.columns} for {len(request.token_ids)} tokens of prompt and {count} of response"
    return None if _are_contiguous(result.weight_spans, count) else "the engine gave weight spans with gaps"


def _are_contiguous(spans: Sequence[WeightSpan], count: int) -> bool:
    """Return whether the spans follow each other from 0 to `count`; without spans this holds."""
    if not spans:
        return True
    ends = [0, *(span.end for span in spans)]
    return [span.start for span in spans] == ends[:-1] and ends[-1] == count
