"""`scorers`: rewards from models, judges and functions, by name; `env.<name>.scorers` says whom they score."""

from typing import Any, Literal

from pydantic import Field

from nemo_rl.config.environment import BatchingConfig
from nemo_rl.config.kinds import Entry, factory_at
from nemo_rl.config.policy import ServedModelConfig
from nemo_rl.config.section import Section


class ScorerConfig(Section):
    """What every scorer has."""

    type: str | None = None  # a kind below or a dotted path; None: the entry's own name
    weight: float = 1.0  # of its score in the reward


class BatchedScorerConfig(ScorerConfig):
    """A scorer that is called with several rollouts at once."""

    timeout_s: float = Field(default=120.0, gt=0)  # of one call
    batching: BatchingConfig = BatchingConfig(enabled=True, max_batch_size=16)


class FunctionScorerConfig(BatchedScorerConfig):
    """A rule: `(messages, metadata) -> float`, in processes of its own."""

    function: str  # a dotted path
    num_workers: int = Field(default=2, gt=0)


class RewardModelScorerConfig(BatchedScorerConfig):
    """A sequence classifier of one label, in this process or in a Ray actor."""

    model_name: str  # a Hugging Face name or a folder
    tokenizer_name: str | None = None  # None: model_name
    chat_template: str | None = None  # a Jinja text or a file; None: the tokenizer's own
    max_length: int = Field(default=4096, gt=0)  # tokens; a longer conversation is a typed failure
    micro_batch_size: int = Field(default=8, gt=0)  # conversations of one forward pass
    packing: bool = False  # without padding: those of one forward pass in one row; refused where it is not exact
    precision: Literal["float32", "bfloat16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    in_actor: bool = True  # a process of its own; scoring there takes no time of the trainer's
    num_replicas: int = Field(default=1, gt=0)  # actors; the least busy one is asked
    start_timeout_s: float = Field(default=300.0, gt=0)  # for an actor to have loaded the model


class EndpointScorerConfig(ScorerConfig, ServedModelConfig):
    """A served scorer.

    Requests go one by one, and `limits` bounds each: there is neither `timeout_s` nor `batching`.
    """


class ClassifyScorerConfig(EndpointScorerConfig):
    """A served reward model: `POST /classify` or `/pooling` of vLLM, `/classify` of SGLang, `/v1/embeddings`."""

    api: Literal["vllm_classify", "vllm_pooling", "sglang_classify", "embeddings"] = "vllm_classify"
    tokenizer_name: str | None = None  # renders the conversation; None: `model`
    chat_template: str | None = None
    label: int = Field(default=0, ge=0)  # whose score it is, where the model has several


class JudgeScorerConfig(EndpointScorerConfig):
    """A generative judge over chat completions."""

    prompt: str  # Jinja, with `messages`, `prompt`, `response` and the row's `metadata`
    system_prompt: str | None = None
    parser: str = r"(?i)score\s*[:=]\s*(-?\d+(?:\.\d+)?)"  # a regular expression with one group, or a dotted path
    min_score: float | None = None  # outside of both the answer is a typed failure
    max_score: float | None = None
    temperature: float = Field(default=0.0, ge=0)
    max_tokens: int = Field(default=512, gt=0)


class CustomScorerConfig(BatchedScorerConfig):
    """A class by dotted path: interfaces.Scorer, made with `kwargs`."""

    kwargs: dict[str, Any] = Field(default_factory=dict)


FUNCTION = Entry(FunctionScorerConfig, make=factory_at("nemo_rl.environments.scorers.rules:RuleScorer"))
REWARD_MODEL = Entry(
    RewardModelScorerConfig, make=factory_at("nemo_rl.environments.scorers.reward_model:RewardModelScorer")
)
CLASSIFY = Entry(ClassifyScorerConfig, make=factory_at("nemo_rl.environments.scorers.classify:ClassifyScorer"))
JUDGE = Entry(JudgeScorerConfig, make=factory_at("nemo_rl.environments.scorers.judge:JudgeScorer"))


class RewardModelPlacementConfig(Section):
    """`reward_model`, as verl names it: where the scorers of kind reward_model live."""

    enable: bool = False
    enable_resource_pool: bool = False  # GPUs of their own: scoring overlaps generation; else the policy's, after it
    n_gpus_per_node: int = 0
    nnodes: int = 0

    @property
    def shares_device(self) -> bool:
        """They score behind the rollouts of a step, while the engine sleeps."""
        return self.enable and not self.enable_resource_pool
