"""The model of a collection: its tokenizer and prompts, then an engine of its own or a server that runs already."""

import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass

from nemo_rl.build.agents import agent_configs
from nemo_rl.build.inputs import check_context_length, check_tasks
from nemo_rl.build.models import resolve_model
from nemo_rl.build.nemo_gym import gym_configs
from nemo_rl.build.served import ConnectedServer, connect
from nemo_rl.config.collect import SampledRunConfig
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.datasets import PromptSet, check_prompt_lengths
from nemo_rl.data.input import InputSet, load_input
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.data.unrendered import TextOnlyChatEncoder
from nemo_rl.distributed.device import resolve_device
from nemo_rl.errors import ConfigError
from nemo_rl.generation.make import make_generation
from nemo_rl.interfaces import Generation
from nemo_rl.policy.hf_model import load_config

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CollectionInputs:
    input_set: InputSet
    encoder: ChatEncoder
    model_path: str  # a folder or a hub name
    served: ConnectedServer | None  # None: an engine is to be started

    @property
    def prompt_set(self) -> PromptSet:
        return PromptSet("input", self.input_set.prompts)


def engine_name(config: SampledRunConfig, inputs: CollectionInputs) -> str:
    """Which kind of engine samples: vllm, hf, completions or chat."""
    return config.server.backend if inputs.served is None else inputs.served.api


async def load_collection_inputs(config: SampledRunConfig, stack: AsyncExitStack) -> CollectionInputs:
    """Prompts and tokenizer; a server at `server.address` is asked what it takes, its client closed with `stack`.

    Raises ConfigError naming the key, EndpointError for a server that does not answer.
    """
    input_set = load_input(config.data, config.collection.limit)
    prompt_set = PromptSet("input", input_set.prompts)
    check_tasks(config, (prompt_set,))
    model_path = await _resolve_model_path(config)
    encoder = _make_encoder(config, model_path)
    served = None
    if config.server.address is not None:
        served = await connect(config, encoder)
        stack.push_async_callback(served.generation.close)
        if served.api == "chat":
            _check_chat_api(config)
            encoder = TextOnlyChatEncoder()
    else:
        trusted = config.server.trust_remote_code
        model = load_config(model_path, {}, trust_remote_code=trusted).get_text_config()
        check_context_length(config.policy, model)
    assert encoder is not None  # a server that takes tokens was asked with them
    if config.data.max_input_seq_length is not None:
        check_prompt_lengths((prompt_set,), encoder, config.data.max_input_seq_length)
    return CollectionInputs(input_set, encoder, model_path, served)


async def open_engine(config: SampledRunConfig, inputs: CollectionInputs, stack: AsyncExitStack) -> Generation:
    """The server's client, or an engine started now and closed with `stack`."""
    if inputs.served is not None:
        return inputs.served.generation
    generation = await make_generation(
        config.server.engine(config.policy.generation),
        model_path=inputs.model_path,
        dtype=config.policy.precision,
        max_model_len=config.policy.max_total_sequence_length,
        device=resolve_device(config.policy.device).type,
        trust_remote_code=config.server.trust_remote_code,
    )
    stack.push_async_callback(generation.close)
    return generation


async def _resolve_model_path(config: SampledRunConfig) -> str:
    """A server that takes messages needs no files here, so that the model's name may be one of the server's alone."""
    name = config.policy.model_name
    return name if config.server.address is not None and config.server.api == "chat" else await resolve_model(name)


def _make_encoder(config: SampledRunConfig, model_path: str) -> ChatEncoder | None:
    """None where messages are all that a server can be sent."""
    if config.server.api == "chat":
        return None
    try:
        tokenizer = load_tokenizer(
            config.policy.tokenizer, model_path, trust_remote_code=config.server.trust_remote_code
        )
        encoder = ChatEncoder(tokenizer, chat_template_kwargs=config.policy.tokenizer.chat_template_kwargs)
        encoder.check()
    except ConfigError as error:
        if config.server.address is None or config.server.api == "completions":
            raise
        logger.info("the server is sent messages, not tokens: %s", error)
        return None
    return encoder


def _check_chat_api(config: SampledRunConfig) -> None:
    """What needs tokens cannot be had of a server that takes messages."""
    if config.collection.write_token_ids:
        raise ConfigError("collect.write_token_ids", True, "the server takes and gives text alone (server.api: chat)")
    if config.policy.generation.ignore_eos:
        raise ConfigError("policy.generation.ignore_eos", True, "a server that takes messages ends its own turns")
    if names := [*agent_configs(config), *gym_configs(config)]:
        problem = f"env.{names[0]} talks to the gateway, which needs a server that takes token ids (vLLM)"
        raise ConfigError("server.api", "chat", problem)
