"""The engine that the configuration asks for."""

from nemo_rl.config.generation import GenerationSection
from nemo_rl.interfaces import Generation


async def make_generation(
    section: GenerationSection, *, model_path: str, dtype: str, max_model_len: int, device: str
) -> Generation:
    """Start the engine; takes seconds. `dtype` and `max_model_len` hold where the section says nothing else.

    Raises ConfigError for settings that the engine refuses, GenerationError when it does not start.
    """
    # Imported here: each takes seconds that a run with another engine need not wait.
    if section.backend == "hf":
        from nemo_rl.generation.hf import HFGeneration

        return HFGeneration(model_path, dtype=dtype, device=device, max_model_len=max_model_len)
    if section.in_actor:
        from nemo_rl.generation.actor import VllmActorGeneration as Vllm
    else:
        from nemo_rl.generation.vllm import VllmGeneration as Vllm
    return await Vllm.create(section, model_path=model_path, dtype=dtype, max_model_len=max_model_len, device=device)
