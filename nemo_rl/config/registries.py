"""The kinds of this project with their built-in entries: where everything pluggable is found."""

from nemo_rl.config.kinds import Kind

LOSSES = Kind(
    noun="a loss",
    name_key="type",
    built_in={},
    adapter="nemo_rl.losses.custom:adapt_loss",
    default="ppo",
)
ADVANTAGE_ESTIMATORS = Kind(
    noun="an advantage estimator",
    name_key="name",
    built_in={},
    adapter="nemo_rl.algorithms.advantages:adapt_estimator",
    default="grpo",
)
ENGINES = Kind(
    noun="a generation engine",
    name_key="backend",
    built_in={
        "vllm": "nemo_rl.generation.vllm.entry:VLLM",
        "hf": "nemo_rl.generation.engines:HF",
    },
    adapter="nemo_rl.generation.engines:adapt_engine",
    default="vllm",
)
WEIGHT_TRANSPORTS = Kind(
    noun="a weight transport",
    name_key="transport",
    built_in={
        name: f"nemo_rl.weight_sync.transports:{name.upper()}"
        for name in ("auto", "shared_memory", "object_store", "cuda_ipc", "nccl")
    },
    adapter="nemo_rl.weight_sync.transports:adapt_transport",
    default="auto",
)
POLICY_BACKENDS = Kind(
    noun="a policy backend",
    name_key="backend",
    built_in={},
    adapter="nemo_rl.policy.backends:adapt_backend",
    default="auto",
)
ENVIRONMENTS = Kind(
    noun="an environment",
    name_key="type",
    built_in={
        "math": "nemo_rl.environments.math:MATH",
        "reasoning_gym": "nemo_rl.environments.reasoning_gym:REASONING_GYM",
        "sliding_puzzle": "nemo_rl.environments.sliding_puzzle:SLIDING_PUZZLE",
        "tools": "nemo_rl.environments.tools:TOOLS",
        "agent": "nemo_rl.experience.agents:AGENT",
        "nemo_gym": "nemo_rl.environments.nemo_gym.entry:NEMO_GYM",
        "reward_model": "nemo_rl.environments.reward_model:REWARD_MODEL",
    },
    adapter="nemo_rl.environments.registry:adapt_environment",
)
SCORERS = Kind(
    noun="a scorer",
    name_key="type",
    built_in={
        "function": "nemo_rl.environments.scorers.rules:FUNCTION",
        "reward_model": "nemo_rl.environments.scorers.reward_model:REWARD_MODEL",
        "classify": "nemo_rl.environments.scorers.classify:CLASSIFY",
        "judge": "nemo_rl.environments.scorers.judge:JUDGE",
    },
    adapter="nemo_rl.environments.scorers.registry:adapt_scorer",
)
DATASETS = Kind(
    noun="a dataset",
    name_key="dataset_name",
    built_in={},
    adapter="nemo_rl.data.sources:adapt_dataset",
)
PROCESSORS = Kind(
    noun="a processor",
    name_key="processor",
    built_in={},
    adapter="nemo_rl.data.processors:adapt_processor",
)
LOGGERS = Kind(
    noun="a logger",
    name_key="type",
    built_in={},
    adapter="nemo_rl.observability.loggers:adapt_logger",
)
