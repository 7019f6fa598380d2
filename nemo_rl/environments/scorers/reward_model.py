"""Scorer `reward_model`: the section of a reward model that this run loads; reward_model_replicas.py scores with it."""

from typing import Any, Literal

from pydantic import Field

from nemo_rl.config.environment import ModelScorerConfig
from nemo_rl.config.kinds import Entry, Section, factory_at
from nemo_rl.config.value_types import Seconds


class RenderingConfig(Section):
    """Rendering of a conversation as the tokens to score."""

    tokenizer_name: str | None = None  # None: that of the model
    chat_template: str | None = None  # Jinja text or a file; None: that of the tokenizer
    # further variables of the chat template, e.g. enable_thinking
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class RewardModelScorerConfig(RenderingConfig, ModelScorerConfig):
    """A sequence classifier of one label, in this process or in Ray actors."""

    max_length: int = Field(default=4096, gt=0)  # tokens; a response that makes it longer is a wrong answer
    micro_batch_size: int = Field(default=8, gt=0)  # conversations per forward pass
    packing: bool = False  # concatenate the conversations of a forward pass; refused if that is not exact
    precision: Literal["float32", "bfloat16"] = "float32"  # dtype of the forward pass
    start_timeout_s: Seconds = 300.0  # until an actor has loaded the model


REWARD_MODEL = Entry(
    RewardModelScorerConfig,
    make=factory_at("nemo_rl.environments.scorers.reward_model_replicas:RewardModelScorer"),
)
