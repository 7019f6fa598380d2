"""The kinds of this project with their built-in entries: where everything pluggable is found."""

from dataclasses import replace

from nemo_rl.config.kinds import Kind

# Optional parts, which only these paths name: `load_optional` skips what is not installed.
RECIPE_TRANSLATORS = ("nemo_rl.compat.translation",)  # modules of recipe_files.RecipeTranslator
RECIPE_WRITERS = ("nemo_rl.compat.recipe_writer",)  # modules of translators.RecipeWriter
KEY_EXPLAINERS = ("nemo_rl.compat.key_names",)  # modules of reference.KeyExplainer
ENVIRONMENT_ADAPTERS = ("nemo_rl.compat.environments:adapt_environment",)  # (key, path, target) -> Entry | None

POLICY_GRADIENT_LOSSES = (
    "ppo", "cispo", "gspo", "gspo_token", "gmpo", "sapo", "vespo", "dppo", "reinforce", "clip_cov", "kl_cov",
)  # fmt: skip
LOSSES = Kind(
    noun="a loss",
    name_key="type",
    built_in={
        **{name: f"nemo_rl.losses.surrogates:{name.upper()}" for name in POLICY_GRADIENT_LOSSES},
        "distillation": "nemo_rl.losses.distillation_section:DISTILLATION",
    },
    adapter="nemo_rl.losses.make:adapt_loss",
    default="ppo",
)
DISTILLATION_LOSSES = replace(LOSSES, default="distillation")  # the same entries
ADVANTAGE_ESTIMATORS = Kind(
    noun="an advantage estimator",
    name_key="name",
    built_in={
        name: f"nemo_rl.algorithms.estimators:{name.upper()}"
        for name in ("grpo", "grpo_passk", "opo", "remax", "gdpo", "reinforce_plus_plus", "opd")
    },
    adapter="nemo_rl.algorithms.estimators:adapt_estimator",
    default="grpo",
)
ENGINES = Kind(
    noun="a generation engine",
    name_key="backend",
    built_in={
        "vllm": "nemo_rl.generation.vllm.entry:VLLM",
        "hf": "nemo_rl.generation.driver_engines:HF",
    },
    adapter="nemo_rl.generation.driver_engines:adapt_engine",
    default="vllm",
)
WEIGHT_TRANSPORTS = Kind(
    noun="a weight transport",
    name_key="transport",
    built_in={
        name: f"nemo_rl.weight_sync.transports:{name.upper()}"
        for name in ("auto", "in_process", "shared_memory", "object_store", "cuda_ipc", "nccl")
    },
    adapter="nemo_rl.weight_sync.transports:adapt_transport",
    default="auto",
)
POLICY_BACKENDS = Kind(
    noun="a policy backend",
    name_key="backend",
    built_in={
        "fsdp2": "nemo_rl.policy.fsdp2.backend:FSDP2",
        "megatron": "nemo_rl.policy.megatron.backend:MEGATRON",
    },
    adapter="nemo_rl.policy.custom_backend:adapt_backend",
)
TEACHER_BACKENDS = Kind(
    noun="a teacher's backend",
    name_key="backend",
    built_in={
        "fsdp2": "nemo_rl.policy.fsdp2.backend:FSDP2_TEACHER",
        "megatron": "nemo_rl.policy.megatron.backend:MEGATRON_TEACHER",
    },
    adapter="nemo_rl.policy.custom_backend:adapt_backend",
)
ENVIRONMENTS = Kind(
    noun="an environment",
    name_key="type",
    built_in={
        "math": "nemo_rl.environments.math_answers:MATH",
        "reasoning_gym": "nemo_rl.environments.reasoning_gym:REASONING_GYM",
        "sliding_puzzle": "nemo_rl.environments.sliding_puzzle:SLIDING_PUZZLE",
        "spelling_duel": "nemo_rl.environments.spelling_duel:SPELLING_DUEL",
        "tools": "nemo_rl.environments.tools:TOOLS",
        "agent": "nemo_rl.experience.agents:AGENT",
        "nemo_gym": "nemo_rl.environments.nemo_gym.entry:NEMO_GYM",
        "mcp": "nemo_rl.environments.ecosystem.mcp:MCP",
        "openenv": "nemo_rl.environments.ecosystem.openenv:OPENENV",
        "verifiers": "nemo_rl.environments.ecosystem.verifiers:VERIFIERS",
        "harbor": "nemo_rl.environments.ecosystem.harbor:HARBOR",
        "reward_model": "nemo_rl.environments.scored_turn:REWARD_MODEL",
        "tagged_answers": "nemo_rl.environments.tagged_answers:TAGGED_ANSWERS",
    },
    adapter="nemo_rl.environments.registry:adapt_environment",
)
SCORERS = Kind(
    noun="a scorer",
    name_key="type",
    built_in={
        "function": "nemo_rl.environments.scorers.function_scorer:FUNCTION",
        "reward_model": "nemo_rl.environments.scorers.reward_model:REWARD_MODEL",
        "classify": "nemo_rl.environments.scorers.classify:CLASSIFY",
        "judge": "nemo_rl.environments.scorers.judge:JUDGE",
    },
    adapter="nemo_rl.environments.scorers.make_scorer:adapt_scorer",
)
DATASETS = Kind(
    noun="a dataset",
    name_key="dataset_name",
    built_in={
        "jsonl": "nemo_rl.data.row_sources:JSONL",
        "huggingface": "nemo_rl.data.row_sources:HUGGINGFACE",
        "reasoning_gym": "nemo_rl.data.reasoning_gym_rows:REASONING_GYM",
        "nemo_gym": "nemo_rl.data.nemo_gym_dataset:NEMO_GYM_DATASET",
        "verifiers": "nemo_rl.environments.ecosystem.verifiers:VERIFIERS_DATASET",
        "harbor": "nemo_rl.environments.ecosystem.harbor:HARBOR_DATASET",
        "OpenMathInstruct-2": "nemo_rl.data.public_datasets:OPEN_MATH_INSTRUCT_2",
        "DeepScaleR": "nemo_rl.data.public_datasets:DEEP_SCALER",
        "AIME2024": "nemo_rl.data.public_datasets:AIME_2024",
        "AIME2025": "nemo_rl.data.public_datasets:AIME_2025",
        "AIME2026": "nemo_rl.data.public_datasets:AIME_2026",
        "DAPOMath17K": "nemo_rl.data.public_datasets:DAPO_MATH_17K",
        "DAPOMathAIME2024": "nemo_rl.data.public_datasets:DAPO_MATH_AIME_2024",
        "NuminaMath-1.5": "nemo_rl.data.public_datasets:NUMINA_MATH",
        "OpenR1-Math-220k": "nemo_rl.data.public_datasets:OPEN_R1_MATH",
        "MATH-500": "nemo_rl.data.public_datasets:MATH_500",
        "gsm8k": "nemo_rl.data.public_datasets:GSM8K",
        "tulu3_sft_mixture": "nemo_rl.data.public_datasets:TULU3_SFT_MIXTURE",
        "Nemotron-Cascade-2-SFT-Math": "nemo_rl.data.public_datasets:NEMOTRON_CASCADE_MATH",
        "squad": "nemo_rl.data.public_datasets:SQUAD",
        "HelpSteer3": "nemo_rl.data.public_datasets:HELPSTEER3",
        "Tulu3Preference": "nemo_rl.data.public_datasets:TULU3_PREFERENCE",
        "spell_backward": "nemo_rl.quickstart.words:SPELL_BACKWARD",
        "counted_squares": "nemo_rl.quickstart.pictures:COUNTED_SQUARES",
        "clevr-cogent": "nemo_rl.data.public_pictures:CLEVR_COGENT",
        "geometry3k": "nemo_rl.data.public_pictures:GEOMETRY3K",
        "refcoco": "nemo_rl.data.public_pictures:REFCOCO",
        "open_assistant": "nemo_rl.data.public_datasets:OPEN_ASSISTANT",
        "file": "nemo_rl.data.row_sources:FILE",
        "csv": "nemo_rl.data.row_sources:CSV",
        "mmlu_csv": "nemo_rl.data.public_datasets:MMLU_CSV",
        "mmlu": "nemo_rl.data.public_datasets:MMLU",
        "mmlu_pro": "nemo_rl.data.public_datasets:MMLU_PRO",
        "gpqa": "nemo_rl.data.public_datasets:GPQA",
        "gpqa_diamond": "nemo_rl.data.public_datasets:GPQA_DIAMOND",
    },
    adapter="nemo_rl.data.row_sources:adapt_dataset",
)
PROCESSORS = Kind(
    noun="a processor",
    name_key="processor",
    built_in={
        "question_answer": "nemo_rl.data.processors:read_question_answer",
        "final_answer": "nemo_rl.data.processors:read_final_answer",
        "messages": "nemo_rl.data.processors:read_messages",
        "reasoning_gym": "nemo_rl.data.processors:read_reasoning_gym_entry",
    },
    adapter="nemo_rl.data.processors:adapt_processor",
)
LOGGERS = Kind(
    noun="a logger",
    name_key="type",
    built_in={
        "jsonl": "nemo_rl.observability.loggers:JSONL",
        "wandb": "nemo_rl.observability.loggers:WANDB",
        "tensorboard": "nemo_rl.observability.loggers:TENSORBOARD",
    },
    adapter="nemo_rl.observability.loggers:adapt_logger",
)
