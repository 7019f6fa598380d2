"""The model of a collection: its tokenizer and prompts, then an engine of its own or a running server at
`server.address`."""

import logging
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

from nemo_rl.collect.shards import OverlongInput
from nemo_rl.config.collect import SampledRunConfig
from nemo_rl.config.moe import adapters_problem
from nemo_rl.config.policy import EndpointLimitsConfig, ServedModelConfig
from nemo_rl.config.shared_sections import start_limit_s
from nemo_rl.data.chat import ChatEncoder, TextOnlyChatEncoder
from nemo_rl.data.prompt_screen import LengthLimit, find_overlong, refuse_overlong
from nemo_rl.data.prompt_sets import InputSet, PromptSet, load_input
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.data.vision import ImageEncoder
from nemo_rl.distributed.devices import Device, choose_device
from nemo_rl.distributed.endpoint import Endpoint, EndpointError
from nemo_rl.distributed.vision_towers import sees
from nemo_rl.errors import ConfigError
from nemo_rl.generation.engines import EngineModel, make_generation
from nemo_rl.generation.served import CHAT, COMPLETIONS, Api, ServedGeneration
from nemo_rl.interfaces import Generation
from nemo_rl.launch.memory_plan import sampling_memory_plan
from nemo_rl.launch.models import resolve_model
from nemo_rl.launch.resolved_model import check_context_length, check_images_are_seen
from nemo_rl.launch.resolved_run import GPU_KEYS, check_tasks
from nemo_rl.launch.starting_adapters import adapter_slots, load_adapters
from nemo_rl.policy.hf_model import load_config
from nemo_rl.types import Message

logger = logging.getLogger(__name__)

KEY = "server"
ANY_MODEL = "any"  # until the server has named its models
PROBE = (Message("user", "Hello"),)
PROBE_TOKENS = 8
# Statuses of a server without completions of token ids; any other error says nothing about its API.
UNSUPPORTED_STATUSES = frozenset({200, 400, 404, 405, 415, 422, 501})  # 200: a page instead of JSON
COMPLETION_LIMIT_KEY = "max_completion_tokens"  # required by OpenAI's newer models; older servers only know max_tokens


@dataclass(frozen=True, slots=True)
class ConnectedServer:
    """A server that has answered, with the API that it supports."""

    generation: ServedGeneration
    model: str
    api: Api


async def connect(config: SampledRunConfig, encoder: ChatEncoder | None) -> ConnectedServer:
    """Probe the server at `server.address`. `encoder` is that of the model's tokenizer; None: only messages can be
    sent.

    Raises ConfigError for a model or an API that it does not have, EndpointError for a server that does not answer.
    """
    server = config.server
    endpoint = Endpoint(KEY, _make_endpoint_config(config))
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


def _make_endpoint_config(config: SampledRunConfig) -> ServedModelConfig:
    """Return the endpoint of the server; requests name the model that `connect` resolves."""
    server = config.server
    return ServedModelConfig(
        base_urls=list(server.addresses),
        model=server.model or ANY_MODEL,
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
        logger.info("server lists no models; requesting %s", requested)
        return requested
    if requested is not None and requested not in known:
        raise ConfigError(f"{KEY}.model", requested, "the server does not have it", known=known)
    if requested is None and len(known) != 1:
        raise ConfigError(f"{KEY}.model", None, "the server has several models: choose one", known=known)
    return requested or known[0]


async def _supports_token_ids(endpoint: Endpoint, model: str, encoder: ChatEncoder | None, *, required: bool) -> bool:
    """Return whether completions take and return token ids; with `required`, raise ConfigError if they do not.

    Raises EndpointError for a server that fails (a 500, a refused key, no answer): its API is unknown.
    """
    if encoder is None:
        return False
    ids = [token_id for message in encoder.encode_prompt(PROBE) for token_id in message.token_ids]
    body = {"model": model, "prompt": ids, "max_tokens": 1, "logprobs": 0, "return_token_ids": True}
    try:
        answer: Any = await endpoint.post(COMPLETIONS, body, num_tokens=len(ids))
        problem = "" if answer["choices"][0].get("token_ids") else "its answer holds no token_ids"
    except EndpointError as error:
        if error.status not in UNSUPPORTED_STATUSES:
            hint = f"cannot tell which API the server has; {KEY}.api: chat sends messages without asking"
            raise EndpointError(f"{error} ({hint})", error.status) from error
        problem = str(error)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        problem = f"its answer holds no completion: {type(error).__name__}: {error}"
    if problem and required:
        raise ConfigError(f"{KEY}.api", "completions", f"the server does not give token ids for token ids: {problem}")
    if problem:
        logger.info("sending messages instead of token ids to the server: %s", problem)
    return not problem


async def _chat_limit_key(endpoint: Endpoint, model: str) -> str:
    """Return the server's name for the limit of a response's tokens."""
    body = {"model": model, "messages": [{"role": "user", "content": PROBE[0].content}]}
    try:
        await endpoint.post(CHAT, {**body, "max_tokens": PROBE_TOKENS}, num_tokens=PROBE_TOKENS)
    except EndpointError as error:
        if COMPLETION_LIMIT_KEY not in str(error):
            raise
        return COMPLETION_LIMIT_KEY
    return "max_tokens"


@dataclass(frozen=True, slots=True)
class CollectionInputs:
    input_set: InputSet
    encoder: ChatEncoder
    model_path: str  # a directory or a hub name
    served: ConnectedServer | None  # None: an engine will be started
    vision_type: str | None = None  # type of a model that sees, if the run starts an engine for it
    overlong: OverlongInput | None = None  # None: every prompt fits
    masked_tasks: frozenset[int] = frozenset()  # over-long ones that are in the input

    @property
    def prompt_set(self) -> PromptSet:
        return PromptSet("input", self.input_set.prompts)


def engine_name(config: SampledRunConfig, inputs: CollectionInputs) -> str:
    """Return which kind of engine samples: vllm, hf, completions or chat."""
    return config.server.backend if inputs.served is None else inputs.served.api


async def load_collection_inputs(config: SampledRunConfig, stack: AsyncExitStack) -> CollectionInputs:
    """Load prompts and tokenizer; a server at `server.address` is probed for its API, its client closed with `stack`.

    Raises ConfigError naming the key, EndpointError for a server that does not answer.
    """
    input_set = load_input(config.data, config.collection.limit)
    prompt_set = PromptSet("input", input_set.prompts)
    check_tasks(config, (prompt_set,))
    model_path = await _resolve_model_path(config)
    model = None
    if config.server.address is None:
        model = load_config(model_path, {}, trust_remote_code=config.server.trust_remote_code)
    vision_type = model.model_type if model is not None and sees(model) else None
    encoder = _make_encoder(config, model_path, sees_images=vision_type is not None)
    served = None
    if config.server.address is not None:
        served = await connect(config, encoder)
        stack.push_async_callback(served.generation.close)
        if served.api == "chat":
            _check_chat_api(config)
            encoder = TextOnlyChatEncoder()
    if model is not None:
        if config.server.adapters and (problem := adapters_problem(model)):
            raise ConfigError("server.adapters", list(config.server.adapters), f"{problem}; allowed: merged weights")
        check_context_length(config.policy, model)
    assert encoder is not None  # needed to probe a server for token ids
    check_images_are_seen(config, encoder)
    inputs = _screen_lengths(config, CollectionInputs(input_set, encoder, model_path, served, vision_type))
    if inputs.overlong is not None:
        logger.warning("input: %s", inputs.overlong.describe())
    return inputs


def _screen_lengths(config: SampledRunConfig, inputs: CollectionInputs) -> CollectionInputs:
    """Return the inputs with their over-long prompts masked or dropped; raises ConfigError as `data.overlong` says."""
    data, prompts, room = config.data, inputs.input_set.prompts, config.policy.max_total_sequence_length - 1
    limit = LengthLimit(inputs.encoder, min(data.max_input_seq_length or room, room))
    if data.overlong == "refuse":
        refuse_overlong(prompts, limit)
        return inputs
    found = find_overlong(prompts, limit)
    if not found:
        return inputs
    overlong = OverlongInput(data.overlong, limit.max_tokens, dict(Counter(found.values())))
    if data.overlong == "mask":
        return replace(inputs, overlong=overlong, masked_tasks=frozenset(found))
    kept = replace(inputs.input_set, prompts=prompts.without(found))
    return replace(inputs, overlong=overlong, input_set=kept)


def find_device(config: SampledRunConfig) -> Device | None:
    """Return the device of the engine that the run starts, None with a running server; raises ConfigError."""
    if config.server.address is not None:
        return None
    return choose_device(config.policy.device, config.engine.devices)


def find_planned_device(config: SampledRunConfig) -> Device:
    """Return the device that a plan is for: that of this machine, or CUDA for a recipe that names GPUs."""
    if config.cluster.gpus_per_node > 0 and config.cluster.model_fields_set & GPU_KEYS:
        return "cuda"
    return find_device(config) or "cpu"


async def open_engine(config: SampledRunConfig, inputs: CollectionInputs, stack: AsyncExitStack) -> Generation:
    """Return the server's client, or start an engine that `stack` closes."""
    if inputs.served is not None:
        return inputs.served.generation
    device = find_device(config)
    assert device is not None  # without a server
    if device == "cuda":
        sampling_memory_plan(config).log_problems()
    model = EngineModel(
        inputs.model_path,
        config.policy.precision,
        config.policy.max_total_sequence_length,
        device,
        config.server.trust_remote_code,
        vision_type=inputs.vision_type,
        adapters=adapter_slots(config),
    )
    generation = await make_generation(config.engine, model, start_timeout_s=start_limit_s(inputs.model_path))
    stack.push_async_callback(generation.close)
    await load_adapters(config, generation)
    return generation


async def _resolve_model_path(config: SampledRunConfig) -> str:
    """Return the model's path; a server that takes messages needs no files here, so its model may have any name."""
    name = config.policy.model_name
    return name if config.server.address is not None and config.server.api == "chat" else await resolve_model(name)


def _make_encoder(config: SampledRunConfig, model_path: str, *, sees_images: bool) -> ChatEncoder | None:
    """Return the encoder; None if messages are all that a server can be sent."""
    if config.server.api == "chat":
        return None
    try:
        tokenizer = load_tokenizer(
            config.policy.tokenizer, model_path, trust_remote_code=config.server.trust_remote_code
        )
        images = ImageEncoder.load(model_path) if sees_images else None
        kwargs = config.policy.tokenizer.chat_template_kwargs
        encoder = ChatEncoder(tokenizer, chat_template_kwargs=kwargs, images=images)
        encoder.check()
        encoder.check_images()
    except ConfigError as error:
        if config.server.address is None or config.server.api == "completions":
            raise
        logger.info("sending messages instead of token ids to the server: %s", error)
        return None
    return encoder


def _check_chat_api(config: SampledRunConfig) -> None:
    """Raise ConfigError for options that need tokens if the server takes messages."""
    if config.collection.write_token_ids:
        raise ConfigError("collect.write_token_ids", True, "the server exchanges text only (server.api: chat)")
    if config.policy.generation.ignore_eos:
        raise ConfigError("policy.generation.ignore_eos", True, "a server that takes messages ends its own turns")
    if names := list(config.runner_sections):
        problem = f"env.{names[0]} talks to the gateway, which needs a server that takes token ids (vLLM)"
        raise ConfigError("server.api", "chat", problem)
