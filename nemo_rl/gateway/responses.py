"""Response bodies: a completion object, the same as server-sent events, and a session's chains."""

import json
import time
from dataclasses import dataclass
from typing import Any

from nemo_rl.data.chat import ChatEncoder, to_openai_message, to_openai_tool_call
from nemo_rl.gateway.codec import ParsedResponse
from nemo_rl.gateway.sessions import Chain, Session
from nemo_rl.types import Completion


@dataclass(frozen=True, slots=True)
class Answer:
    """A completed call."""

    completion_id: str
    model: str
    prompt_token_ids: tuple[int, ...]
    completion: Completion
    response: ParsedResponse
    with_token_ids: bool  # put them on the message, for clients that echo or keep them
    with_logprobs: bool

    @property
    def finish_reason(self) -> str:
        if self.completion.finish_reason == "length":
            return "length"
        return "tool_calls" if self.response.message.tool_calls else "stop"

    @property
    def usage(self) -> dict[str, int]:
        prompt, sampled = len(self.prompt_token_ids), len(self.completion.token_ids)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def completion_body(answer: Answer, encoder: ChatEncoder) -> dict[str, Any]:
    """Return a `chat.completion` object."""
    choice = {
        "index": 0,
        "message": _message_body(answer),
        "logprobs": _logprobs(answer, encoder),
        "finish_reason": answer.finish_reason,
    }
    return {**_common_fields(answer, "chat.completion"), "choices": [choice], "usage": answer.usage}


def event_stream(answer: Answer, encoder: ChatEncoder, *, include_usage: bool) -> bytes:
    """Return the completion as `chat.completion.chunk` events: the whole message, the finish reason, [DONE]."""
    delta = _message_body(answer)
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
    choices = [
        {"index": 0, "delta": delta, "logprobs": _logprobs(answer, encoder), "finish_reason": None},
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": answer.finish_reason},
    ]
    head = _common_fields(answer, "chat.completion.chunk")
    chunks: list[dict[str, Any]] = [{**head, "choices": [choice]} for choice in choices]
    if include_usage:
        chunks = [{**chunk, "usage": None} for chunk in chunks]
        chunks.append({**head, "choices": [], "usage": answer.usage})
    events = [json.dumps(chunk) for chunk in chunks] + ["[DONE]"]
    return "".join(f"data: {event}\n\n" for event in events).encode()


def session_body(session_id: str, session: Session) -> dict[str, Any]:
    """Return a session with its chains, token for token."""
    return {
        "id": session_id,
        "object": "session",
        "num_calls": session.num_calls,
        "rewards": session.rewards,
        "chains": [_chain_body(chain) for chain in session.chains()],
    }


def _common_fields(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": answer.completion_id, "object": kind, "created": int(time.time()), "model": answer.model}


def _message_body(answer: Answer) -> dict[str, Any]:
    message = answer.response.message
    body: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.tool_calls:
        body["tool_calls"] = [to_openai_tool_call(call) for call in message.tool_calls]
        body["content"] = message.content or None
    if answer.response.reasoning is not None:
        body["reasoning_content"] = answer.response.reasoning
    if answer.with_token_ids:
        body["prompt_token_ids"] = answer.prompt_token_ids
        body["generation_token_ids"] = answer.completion.token_ids
        body["generation_log_probs"] = answer.completion.logprobs
    return body


def _logprobs(answer: Answer, encoder: ChatEncoder) -> dict[str, Any] | None:
    if not answer.with_logprobs:
        return None
    sampled = zip(answer.completion.token_ids, answer.completion.logprobs, strict=True)
    content = [{"token": encoder.decode((i,)), "logprob": p, "bytes": None, "top_logprobs": []} for i, p in sampled]
    return {"content": content, "refusal": None}


def _chain_body(chain: Chain) -> dict[str, Any]:
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    # (version, start, end) in the chain's tokens, of messages during which weights were refitted
    spans: list[tuple[int, int, int]] = []
    for each in chain.message_log:
        spans += ((span.version, len(ids) + span.start, len(ids) + span.end) for span in each.weight_spans)
        ids += each.token_ids
        mask += [int(each.is_generated)] * len(each.token_ids)
        logprobs += each.generation_logprobs or [0.0] * len(each.token_ids)
    return {
        "token_ids": ids,
        "token_mask": mask,
        "generation_logprobs": logprobs,
        "messages": [to_openai_message(each.message) for each in chain.message_log],
        "weight_versions": chain.weight_versions,
        "weight_spans": spans,
        "rewards": chain.rewards,
    }
