"""From `policy.model_name` to what transformers loads."""

import re
from dataclasses import dataclass
from pathlib import Path

from nemo_rl.build.quickstart import prepare_model
from nemo_rl.checkpoint import POLICY_DIRECTORY
from nemo_rl.distributed.cache_directory import cache_directory
from nemo_rl.errors import ConfigError
from nemo_rl.quickstart.recipes import pairs_teacher, student, teacher

QUICKSTART_MODEL = "nemo_rl/quickstart"  # "-N" after it: made from seed N
QUICKSTART_TEACHER = "nemo_rl/quickstart-teacher"  # likewise

QUICKSTART_PAIRS_TEACHER = "nemo_rl/quickstart-pairs-teacher"  # likewise; its tokenizer is another

_MODELS = {"quickstart": student, "quickstart-teacher": teacher, "quickstart-pairs-teacher": pairs_teacher}
_NAME = re.compile(r"nemo_rl/(quickstart(?:-pairs)?(?:-teacher)?)(?:-([0-9]+))?")


async def resolve_model(model_name: str) -> str:
    """The path or hub name to load. The quickstart's models are made at their first use, in half a minute."""
    if not model_name.startswith(QUICKSTART_MODEL):
        return model_name
    match = _NAME.fullmatch(model_name)
    if match is None or match[1] not in _MODELS:
        names = f"{QUICKSTART_MODEL}, {QUICKSTART_TEACHER}, {QUICKSTART_PAIRS_TEACHER}"
        allowed = f"allowed: {names}, or {QUICKSTART_MODEL}-N for a seed N"
        raise ConfigError("policy.model_name", model_name, allowed)
    kind, seed = match[1], int(match[2] or 0)
    return str(await prepare_model(cache_directory() / f"{kind}-{seed}", _MODELS[kind](seed)))


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model's weights and its tokenizer lie: folders or hub names, the same unless it is a checkpoint."""

    weights: str
    tokenizer: str


async def find_model(model_name: str) -> ModelFiles:
    """As `resolve_model`; a checkpoint's folder, `step_N`, is the policy that was saved in it."""
    policy = Path(model_name) / POLICY_DIRECTORY
    if (policy / "weights").is_dir():
        return ModelFiles(str(policy / "weights"), str(policy / "tokenizer"))
    path = await resolve_model(model_name)
    return ModelFiles(path, path)
