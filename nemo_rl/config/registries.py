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
    built_in={},
    adapter="nemo_rl.generation.engines:adapt_engine",
    default="vllm",
)
WEIGHT_TRANSPORTS = Kind(
    noun="a weight transport",
    name_key="transport",
    built_in={},
    adapter="nemo_rl.weight_sync.make:adapt_transport",
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
        name: f"nemo_rl.config.environment:{name.upper()}"
        for name in ("math", "reasoning_gym", "sliding_puzzle", "tools", "agent", "nemo_gym", "reward_model")
    },
    adapter="nemo_rl.environments.registry:adapt_environment",
)
SCORERS = Kind(
    noun="a scorer",
    name_key="type",
    built_in={
        name: f"nemo_rl.config.scorers:{name.upper()}" for name in ("function", "reward_model", "classify", "judge")
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
