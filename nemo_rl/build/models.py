"""From `policy.model_name` to what transformers loads."""

from nemo_rl.build.model_names import checkpoint_weights, quickstart_model
from nemo_rl.build.quickstart import prepare_model
from nemo_rl.distributed.cache_directory import cache_directory
from nemo_rl.quickstart.recipes import pairs_teacher, student, teacher

RECIPES = {"quickstart": student, "quickstart-teacher": teacher, "quickstart-pairs-teacher": pairs_teacher}


async def resolve_model(model_name: str, *, key: str = "policy.model_name") -> str:
    """The path or hub name to load, with its tokenizer. A run's checkpoint, `step_N`, is the model in it.

    The quickstart's models are made at their first use, in half a minute.
    """
    parsed = quickstart_model(key, model_name)
    if parsed is None:
        return str(checkpoint_weights(model_name) or model_name)
    kind, seed = parsed
    return str(await prepare_model(cache_directory() / f"{kind}-{seed}", RECIPES[kind](seed)))
