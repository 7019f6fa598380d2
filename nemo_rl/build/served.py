"""The server at `server.address`: which model it has, and whether it takes token ids or messages."""

import logging
from dataclasses import dataclass
from typing import Any

from nemo_rl.config.collect import SampledRunConfig
from nemo_rl.config.endpoint import EndpointLimitsConfig, ServedModelConfig
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.distributed.endpoint import Endpoint, EndpointError
from nemo_rl.errors import ConfigError
from nemo_rl.generation.served import CHAT, COMPLETIONS, Api, ServedGeneration
from nemo_rl.types import Message

logger = logging.getLogger(__name__)

KEY = "server"
PROBE = (Message("user", "Hello"),)
PROBE_TOKENS = 8
COMPLETION_LIMIT_KEY = (
    "max_completion_tokens"  # which OpenAI's newer models ask for; older servers know max_tokens alone
)


@dataclass(frozen=True, slots=True)
class ConnectedServer:
    """A server that has answered."""

    generation: ServedGeneration
    model: str
    api: Api


async def connect(config: SampledRunConfig, encoder: ChatEncoder | None) -> ConnectedServer:
    """Ask the server what it is. `encoder`: of the model's tokenizer; None: only messages can be sent.

    Raises ConfigError for a model or an API that it does not have, EndpointError for a server that does not answer.
    """
    server = config.server
    endpoint = Endpoint(KEY, _make_endpoint_config(config, server.model or ""))
    try:
        model = await _resolve_model_name(endpoint, server.model)
        if server.api != "chat" and await _supports_token_ids(
            endpoint, model, encoder, required=server.api == "completions"
        ):
            return ConnectedServer(ServedGeneration(endpoint, model=model, api="completions"), model, "completions")
        limit_key = await _chat_limit_key(endpoint, model)
        generation = ServedGeneration(endpoint, model=model, api="chat", limit_key=limit_key)
        return ConnectedServer(generation, model, "chat")
    except BaseException:
        await endpoint.close()
        raise


def _make_endpoint_config(config: SampledRunConfig, model: str) -> ServedModelConfig:
    server = config.server
    return ServedModelConfig(
        base_urls=list(server.addresses),
        model=model,
        api_key_env=server.api_key_env,
        limits=EndpointLimitsConfig(
            max_concurrency=config.collection.concurrency,
            requests_per_minute=server.requests_per_minute,
            tokens_per_minute=server.tokens_per_minute,
            request_timeout_s=config.policy.generation.timeout_s,
            max_retries=config.rollout.max_retries,
            retry_backoff_s=config.rollout.retry_backoff_s,
        ),
    )


async def _resolve_model_name(endpoint: Endpoint, requested: str | None) -> str:
    try:
        answer = await endpoint.get("/v1/models")
        known = [str(model["id"]) for model in answer["data"]]
    except (EndpointError, KeyError, TypeError):
        if requested is None:
            raise
        logger.info("the server does not list its models; it is asked for %s", requested)
        return requested
    if requested is not None and requested not in known:
        raise ConfigError(f"{KEY}.model", requested, "the server does not have it", known=known)
    if requested is None and len(known) != 1:
        raise ConfigError(f"{KEY}.model", None, "the server has not one model: choose", known=known)
    return requested or known[0]


async def _supports_token_ids(endpoint: Endpoint, model: str, encoder: ChatEncoder | None, *, required: bool) -> bool:
    """Whether completions take token ids and give them back. With `required` it is a ConfigError where they do not."""
    if encoder is None:
        return False
    ids = [token_id for message in encoder.encode_prompt(PROBE) for token_id in message.token_ids]
    body = {"model": model, "prompt": ids, "max_tokens": 1, "logprobs": 0, "return_token_ids": True}
    try:
        answer: Any = await endpoint.post(COMPLETIONS, body, num_tokens=len(ids))
        problem = "" if answer["choices"][0].get("token_ids") else "its answer holds no token_ids"
    except (EndpointError, KeyError, IndexError, TypeError, AttributeError) as error:
        problem = str(error)
    if problem and required:
        raise ConfigError(f"{KEY}.api", "completions", f"the server does not give token ids for token ids: {problem}")
    if problem:
        logger.info("the server is sent messages, not tokens: %s", problem)
    return not problem


async def _chat_limit_key(endpoint: Endpoint, model: str) -> str:
    """What the server calls the limit of an answer's tokens."""
    body = {"model": model, "messages": [{"role": "user", "content": PROBE[0].content}]}
    try:
        await endpoint.post(CHAT, {**body, "max_tokens": PROBE_TOKENS}, num_tokens=PROBE_TOKENS)
    except EndpointError as error:
        if COMPLETION_LIMIT_KEY not in str(error):
            raise
        return COMPLETION_LIMIT_KEY
    return "max_tokens"
