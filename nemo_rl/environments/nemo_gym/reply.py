"""The reply of a NeMo Gym agent to POST /run, checked: the reward and the model's calls, token for token.

Items of `response.output` that end a call of the model carry the whole prompt of the call, the sampled tokens and their
log-probs. Which calls belong to one chain is decided by the gateway's record, not by the reply.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_rl.environments.nemo_gym.failures import Delivery, EpisodeFailure, is_masked
from nemo_rl.errors import NemoRLError
from nemo_rl.types import FailureClass

TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
# Fields of a reply with the answer that majority@k compares: the `answer_key` of Gym's environments (0.4 to 0.7).
ANSWER_FIELDS = (
    "extracted_answer",
    "extracted_model_code",  # code_gen, bigcodebench, evalplus, scicodepile
    "extracted_code",  # competitive_coding_challenges
    "extracted_sql",
    "extracted_judgement",
    "extracted_grade",
    "extracted_verdict",
)
RESERVED_FIELDS = frozenset({"reward", "response", "responses_create_params", "mask_sample"})


class GymError(NemoRLError):
    """Base of failures of a NeMo Gym server; the text names the agent and its address."""

    delivery: Delivery = "delivered"  # the row's

    @property
    def failure_class(self) -> FailureClass:
        return FailureClass.ENVIRONMENT

    def __init__(self, problem: str, *, agent: str = "", url: str = "") -> None:
        self.problem = problem
        self.agent = agent
        self.url = url
        where = " at ".join(part for part in (f"agent {agent!r}" if agent else "", url) if part)
        super().__init__(f"{where}: {problem}" if where else problem)


class GymUnavailable(GymError):
    """An infrastructure failure: connection refused or reset, 502, 503, 504, or a timeout."""

    def __init__(self, problem: str, *, agent: str = "", url: str = "", delivery: Delivery = "not_sent") -> None:
        note = "; the row may have been delivered" if delivery == "possibly_delivered" else ""
        super().__init__(f"{problem}{note}", agent=agent, url=url)
        self.delivery = delivery

    @property
    def failure_class(self) -> FailureClass:
        return FailureClass.INFRA


class GymStackEnded(GymUnavailable):
    """A started stack that has lost its process, then the text has the end of its log, or one of its servers."""


class GymRefused(GymError):
    """An environment failure: the server refused or failed, with 4xx, or 500 and its text."""


class GymInvalidReply(GymError):
    """An environment failure: a reply that violates NeMo Gym's protocol."""


class GymEpisodeFailed(GymError):
    """A failure that a server reports in its reply, of the class of its kind or stage."""

    def __init__(self, failure: EpisodeFailure, *, agent: str = "", url: str = "") -> None:
        super().__init__(str(failure), agent=agent, url=url)
        self.failure = failure

    @property
    def failure_class(self) -> FailureClass:
        return self.failure.failure_class


@dataclass(frozen=True, slots=True)
class GymCall:
    """One call of the model, as reported by the agent."""

    prompt_token_ids: tuple[int, ...]
    generation_token_ids: tuple[int, ...]
    generation_log_probs: tuple[float, ...]  # finite, one per generated token


@dataclass(frozen=True, slots=True)
class GymReply:
    """One rollout, run and scored by an agent."""

    reward: float
    calls: tuple[GymCall, ...]  # in order; from output items that carry tokens
    is_incomplete: bool  # the last response was truncated, by its token limit or a full context
    mask_sample: bool  # exclude the rollout from the gradient; only before nemo-gym 0.7: there a mask is a failure
    output: tuple[Mapping[str, Any], ...] = ()  # items of the response: messages, reasoning, tool calls and results
    reward_components: Mapping[str, float] = field(default_factory=dict)  # by name, of which `reward` is the sum
    extras: Mapping[str, float | str] = field(default_factory=dict)  # further numbers and texts of the environment
    capture_key: str = ""  # key under which Gym captures the rollout's calls; empty before nemo-gym 0.7


def parse_reply(body: object) -> GymReply:
    """Return the reply in a decoded JSON body; raises GymInvalidReply naming the first invalid field."""
    if not isinstance(body, Mapping):
        raise GymInvalidReply(f"the reply must be an object, not {type(body).__name__}")
    response = body.get("response")
    if not isinstance(response, Mapping):
        raise GymInvalidReply(f"response must be an object, not {_type_name(response)}")
    output = response.get("output")
    if not isinstance(output, list) or not all(isinstance(item, Mapping) for item in output):
        raise GymInvalidReply("response.output must be a list of objects")
    mask_sample = body.get("mask_sample", False)
    if not isinstance(mask_sample, bool):
        raise GymInvalidReply(f"mask_sample must be true or false, not {mask_sample!r}")
    calls = (_parse_call(f"response.output.{i}", item) for i, item in enumerate(output))
    return GymReply(
        reward=_parse_reward(body.get("reward")),
        calls=tuple(call for call in calls if call is not None),
        is_incomplete=bool(response.get("incomplete_details")),
        mask_sample=is_masked(body),
        output=tuple(output),
        reward_components=_parse_components(body),
        extras={name: value for name, value in body.items() if name not in RESERVED_FIELDS and _is_scalar(value)},
    )


def parse_captured_calls(records: Sequence[bytes]) -> tuple[GymCall, ...]:
    """Return the calls in captured records (`TokenEntry` of nemo-gym 0.7); raises GymInvalidReply."""
    calls = []
    for i, record in enumerate(records):
        entry = json.loads(record)
        if entry.get("prompt_is_delta"):
            raise GymInvalidReply(
                f"captured record {i} has part of its prompt; token_id_capture.delta_records must be off"
            )
        if (call := _parse_call(f"captured record {i}", entry)) is None:
            raise GymInvalidReply(f"captured record {i} has no tokens")
        calls.append(call)
    return tuple(calls)


def find_answer(values: Mapping[str, Any]) -> str | None:
    """Return the answer that the environment extracted from the response; None if it found none.

    Programs are compared by their text, as in Gym: two that do the same are two answers.
    """
    found = (values.get(name) for name in ANSWER_FIELDS)
    answer = next((value for value in found if value is not None), None)
    return None if answer is None else str(answer)


def _parse_reward(value: Any) -> float:
    if not _is_number(value):
        raise GymInvalidReply(f"reward must be a finite number, not {_abbreviate(value)}")
    return float(value)


def _parse_components(body: Mapping[str, Any]) -> dict[str, float]:
    """Return the named rewards of an environment with several; raises GymInvalidReply unless `reward` is their sum."""
    components = body.get("reward_components")
    if components is None:
        return {}
    if not isinstance(components, Mapping) or not all(_is_number(value) for value in components.values()):
        raise GymInvalidReply(f"reward_components must be numbers by name, not {_abbreviate(components)}")
    if not math.isclose(sum(components.values()), body["reward"], rel_tol=1e-4, abs_tol=1e-4):
        raise GymInvalidReply(f"reward must be the sum of reward_components, not {_abbreviate(body['reward'])}")
    return {str(name): float(value) for name, value in components.items()}


def _parse_call(where: str, item: Mapping[str, Any]) -> GymCall | None:
    """Return the call that an item ends; None without tokens (a tool result, or an earlier item of the same call)."""
    values: list[Any] = [item.get(name) for name in TOKEN_FIELDS]
    if all(value is None for value in values):
        return None
    for name, value in zip(TOKEN_FIELDS, values, strict=True):
        if not isinstance(value, list):
            raise GymInvalidReply(f"{where}.{name} must be a list, not {_type_name(value)}")
    prompt, generation, log_probs = values
    call = GymCall(
        _check_token_ids(f"{where}.{TOKEN_FIELDS[0]}", prompt),
        _check_token_ids(f"{where}.{TOKEN_FIELDS[1]}", generation),
        _check_log_probs(f"{where}.{TOKEN_FIELDS[2]}", log_probs),
    )
    if len(call.generation_token_ids) != len(call.generation_log_probs):
        counts = f"{len(call.generation_token_ids)} tokens with {len(call.generation_log_probs)} log-probs"
        raise GymInvalidReply(f"{where}: {counts}")
    return call


def _check_token_ids(where: str, values: Sequence[Any]) -> tuple[int, ...]:
    for value in values:
        if type(value) is not int or value < 0:  # a bool is an int too
            raise GymInvalidReply(f"{where} holds {_abbreviate(value)}: no token id")
    return tuple(values)


def _check_log_probs(where: str, values: Sequence[Any]) -> tuple[float, ...]:
    for value in values:  # NaN is null if the server's JSON has no NaN
        if not _is_number(value):
            raise GymInvalidReply(f"{where} holds {_abbreviate(value)}: no finite log-prob")
    return tuple(map(float, values))


def _is_scalar(value: object) -> bool:
    return isinstance(value, str | bool) or _is_number(value)


def _is_number(value: object) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond the range of a float
        return False


def _type_name(value: object) -> str:
    return "missing" if value is None else type(value).__name__


def _abbreviate(value: object) -> str:
    return "nothing" if value is None else repr(value)[:60]
