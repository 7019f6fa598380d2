"""NeMo-RL's Python names that this project lacks, and what replaces them.

`explain_import` is called when code that a configuration names by its dotted path cannot be imported, `find_name` by
the `__getattr__` of the modules at NeMo-RL's import paths.
"""

import importlib
import re
from typing import Any

SCRIPTS = "the script in examples/, whose parts are nemo_rl.launch"
# By the module's name or that of a package above it.
REPLACED_MODULES = {
    "nemo_rl.utils": "nemo_rl.config.loading, nemo_rl.observability.loggers, or the owner of the task "
    "(docs/architecture.md)",
    "nemo_rl.models": "nemo_rl.policy and nemo_rl.generation; protocols: nemo_rl.interfaces",
    "nemo_rl.evals": "examples/run_eval.py (docs/evaluation.md)",
    "nemo_rl.environments.code_environment": "env.<name>.type: tools (nemo_rl.environments.tools)",
    "nemo_rl.environments.reward_model_environment": "env.<name>.scorers (docs/reward_models.md)",
    "nemo_rl.environments.games": "env.<name>.type: sliding_puzzle",
    "nemo_rl.environments.rewards": "nemo_rl.environments.final_answers, or a function of your own",
    "nemo_rl.data.llm_message_utils": "nemo_rl.data.chat (ChatEncoder)",
    "nemo_rl.data.multimodal_utils": "nothing: only text is trained on",
    "nemo_rl.distributed.worker_groups": "nemo_rl.distributed.worker_group",
    "nemo_rl.algorithms.loss": "nemo_rl.losses",
    "nemo_rl.algorithms.loss_functions": "nemo_rl.losses",
    "nemo_rl.algorithms.advantage_estimator": "nemo_rl.algorithms.estimators",
    "nemo_rl.algorithms.reward_functions": "nemo_rl.algorithms.grpo (shape_rewards)",
    "nemo_rl.algorithms.async_utils": "nemo_rl.experience.async_source, and grpo.async_grpo",
    "nemo_rl.algorithms.ppo": "nothing: PPO with a value model is not implemented",
    "nemo_rl.algorithms.sft": f"{SCRIPTS}; nemo_rl.algorithms.supervised_loop has the loop",
    "nemo_rl.algorithms.dpo": f"{SCRIPTS}; nemo_rl.algorithms.supervised_loop has the loop",
    "nemo_rl.algorithms.rm": "examples/run_rm.py (nemo_rl.algorithms.reward_model)",
}
REPLACED_NAMES = {
    "distillation_train": SCRIPTS,
    "RayVirtualCluster": "the section `cluster` of a recipe (docs/clusters.md)",
    "run_async_nemo_gym_rollout": "nemo_rl.experience.nemo_gym_rollouts",
    "SlicedDataDict": "BatchedDataDict",
}


_RESPONSES = ("ResponseDataset", "load_response_dataset")
# Names of NeMo-RL by the module from which its users import them, then by the module of compat that has them.
FOREIGN_NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "nemo_rl.algorithms.grpo": {
        "run_scripts": ("MasterConfig", "setup", "grpo_train", "async_grpo_train", "shutdown_environments")
    },
    "nemo_rl.algorithms.utils": {"run_scripts": ("get_tokenizer", "set_seed")},
    "nemo_rl.models.generation": {"run_scripts": ("configure_generation_config",)},
    "nemo_rl.utils.config": {"run_scripts": ("load_config", "parse_hydra_overrides", "register_omegaconf_resolvers")},
    "nemo_rl.utils.logger": {"run_scripts": ("get_next_experiment_dir", "log_container_init_timing")},
    "nemo_rl.utils.timer": {"run_scripts": ("Timer",)},
    "nemo_rl.data": {"script_data": ("DataConfig",)},
    "nemo_rl.data.datasets": {"script_data": ("AllTaskProcessedDataset", *_RESPONSES)},
    "nemo_rl.data.datasets.response_datasets": {"script_data": _RESPONSES},
    "nemo_rl.data.interfaces": {
        "data_types": (
            *("DatumSpec", "FlatMessagesType", "LLMMessageLogType", "PathLike", "PreferenceDatumSpec"),
            *("TaskDataProcessFnCallable", "TaskDataSpec"),
        )
    },
    "nemo_rl.data.processors": {
        "script_data": ("PROCESSOR_REGISTRY", "math_data_processor", "math_hf_data_processor", "register_processor")
    },
    "nemo_rl.data.utils": {"script_data": ("setup_response_data",)},
    "nemo_rl.distributed.batched_data_dict": {"batched_data_dict": ("BatchedDataDict",)},
    "nemo_rl.distributed.ray_actor_environment_registry": {"script_environments": ("get_actor_python_env",)},
    "nemo_rl.distributed.virtual_cluster": {
        "environment_interface": ("PY_EXECUTABLES",),
        "script_environments": ("init_ray",),
    },
    "nemo_rl.environments.interfaces": {"environment_interface": ("EnvironmentInterface", "EnvironmentReturn")},
    "nemo_rl.environments.math_environment": {"script_environments": ("MathEnvironment",)},
    "nemo_rl.environments.metrics": {"environment_interface": ("calculate_pass_rate_per_prompt",)},
    "nemo_rl.environments.utils": {
        "environment_interface": ("chunk_list_to_workers",),
        "script_environments": ("ENV_REGISTRY", "create_env", "register_env"),
    },
}
REFUSING = (
    "nemo_rl.distributed.virtual_cluster",
    "nemo_rl.environments.utils",
)  # modules that say what replaces a name


def find_name(module: str, name: str) -> Any:
    """Return the object that NeMo-RL's users import from a module of this project; None if it is no name of NeMo-RL.

    Raises ImportError that says what replaces the name.
    """
    for owner, names in FOREIGN_NAMES.get(module, {}).items():
        if name in names:
            return getattr(importlib.import_module(f"nemo_rl.compat.{owner}"), name)
    if module in REFUSING and name in REPLACED_NAMES:
        problem = f"module {module!r} has no attribute {name!r}"
        problem = f"{problem}; NeMo-RL's is replaced by {REPLACED_NAMES[name]} (docs/from_nemo_rl.md)"
        raise ImportError(problem, name=module)
    return None


def explain_import(error: Exception) -> str:
    """Return the replacement of a module or name of NeMo-RL that could not be imported; empty for anything else."""
    module = getattr(error, "name", None) or ""
    missing = re.match(r"cannot import name '(\w+)'", str(error))
    path = f"{module}.{missing[1]}" if missing else module
    for prefix, replacement in REPLACED_MODULES.items():
        if f"{path}.".startswith(f"{prefix}."):
            return f"(a module of NeMo-RL; here: {replacement}, see docs/from_nemo_rl.md)"
    if missing and module.startswith("nemo_rl.") and missing[1] in REPLACED_NAMES:
        return f"(a name of NeMo-RL; here: {REPLACED_NAMES[missing[1]]}, see docs/from_nemo_rl.md)"
    return ""
