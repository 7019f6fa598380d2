"""NeMo-RL's Python names that this project lacks, and what replaces them.

`explain_import` is asked when code that a configuration names by its dotted path cannot be imported; `refuse` makes the
`__getattr__` of the modules at NeMo-RL's import paths.
"""

import re
from collections.abc import Callable
from typing import Any

SCRIPTS = "the script in examples/, whose parts are nemo_rl.launch"
# By the module's name or that of a package above it.
REPLACED_MODULES = {
    "nemo_rl.utils": "nemo_rl.config.loading, nemo_rl.observability.loggers, or the owner of the task "
    "(docs/architecture.md)",
    "nemo_rl.models": "nemo_rl.policy and nemo_rl.generation; protocols: nemo_rl.interfaces",
    "nemo_rl.evals": "examples/run_eval.py (docs/evaluation.md)",
    "nemo_rl.environments.math_environment": "env.<name>.type: math (nemo_rl.environments.math_answers)",
    "nemo_rl.environments.code_environment": "env.<name>.type: tools (nemo_rl.environments.tools)",
    "nemo_rl.environments.reward_model_environment": "env.<name>.scorers (docs/reward_models.md)",
    "nemo_rl.environments.games": "env.<name>.type: sliding_puzzle",
    "nemo_rl.environments.rewards": "nemo_rl.environments.final_answers, or a function of your own",
    "nemo_rl.data.llm_message_utils": "nemo_rl.data.chat (ChatEncoder)",
    "nemo_rl.data.utils": "nemo_rl.data.prompt_sets",
    "nemo_rl.data.multimodal_utils": "nothing: only text is trained on",
    "nemo_rl.distributed.ray_actor_environment_registry": "nothing: one environment serves all processes",
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
    "nemo_rl.algorithms.utils": "nemo_rl.data.tokenizer (tokenizers), and the seed of a recipe",
}
REPLACED_NAMES = {
    "MasterConfig": "nemo_rl.config.master",
    "setup": SCRIPTS,
    "grpo_train": SCRIPTS,
    "async_grpo_train": SCRIPTS,
    "distillation_train": SCRIPTS,
    "RayVirtualCluster": "the section `cluster` of a recipe (docs/clusters.md)",
    "init_ray": "the section `cluster` of a recipe (docs/clusters.md)",
    "create_env": "nemo_rl.environments.registry.make_environment",
    "run_async_nemo_gym_rollout": "nemo_rl.experience.nemo_gym_rollouts",
    "SlicedDataDict": "BatchedDataDict",
}


def explain_import(error: Exception) -> str:
    """Return what replaces the module or name of NeMo-RL that could not be imported; empty for anything else."""
    module = getattr(error, "name", None) or ""
    missing = re.match(r"cannot import name '(\w+)'", str(error))
    path = f"{module}.{missing[1]}" if missing else module
    for prefix, replacement in REPLACED_MODULES.items():
        if f"{path}.".startswith(f"{prefix}."):
            return f"(a module of NeMo-RL; here: {replacement}, see docs/from_nemo_rl.md)"
    if missing and module.startswith("nemo_rl.") and missing[1] in REPLACED_NAMES:
        return f"(a name of NeMo-RL; here: {REPLACED_NAMES[missing[1]]}, see docs/from_nemo_rl.md)"
    return ""


def refuse(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module, which raises for every name, and says what replaces one of NeMo-RL's."""

    def __getattr__(name: str) -> Any:
        problem = f"module {module!r} has no attribute {name!r}"
        if name not in REPLACED_NAMES:
            raise AttributeError(problem, name=name)
        problem = f"{problem}; NeMo-RL's is replaced by {REPLACED_NAMES[name]} (docs/from_nemo_rl.md)"
        raise ImportError(problem, name=module)

    return __getattr__
