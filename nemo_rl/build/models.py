"""From `policy.model_name` to what transformers loads."""

from nemo_rl.distributed.cache_directory import cache_directory
from nemo_rl.errors import ConfigError
from nemo_rl.quickstart.warm_start import prepare_model

QUICKSTART_MODEL = "nemo_rl/quickstart"  # "-N" after it: made from seed N


def resolve_model(model_name: str) -> str:
    """The path or hub name to load. The quickstart's model is made at its first use, in half a minute."""
    if not model_name.startswith(QUICKSTART_MODEL):
        return model_name
    suffix = model_name.removeprefix(QUICKSTART_MODEL)
    if suffix and not (suffix.startswith("-") and suffix[1:].isdecimal()):
        raise ConfigError(
            "policy.model_name", model_name, f"allowed: {QUICKSTART_MODEL}, or {QUICKSTART_MODEL}-N for a seed N"
        )
    seed = int(suffix[1:]) if suffix else 0
    folder = cache_directory() / f"quickstart-{seed}"
    return str(prepare_model(folder, seed=seed))
