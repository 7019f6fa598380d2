"""How well the teachers themselves do on the validation sets, before the student begins to learn from them."""

import logging
from collections.abc import Mapping
from dataclasses import replace

from nemo_rl.build.inputs import Inputs
from nemo_rl.build.rollouts import make_sampling, make_validator
from nemo_rl.build.teachers import teacher_tokenizer
from nemo_rl.config.env import AgentConfig
from nemo_rl.config.master import TrainingRunConfig
from nemo_rl.config.nemo_gym import NemoGymConfig
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.data.datasets import PromptSet
from nemo_rl.experience.rollouts import RolloutContext

logger = logging.getLogger(__name__)

REPORTED_METRICS = ("accuracy", "greedy_accuracy")


async def validate_teachers(
    config: TrainingRunConfig, inputs: Inputs, context: RolloutContext, teacher_paths: Mapping[str, str]
) -> dict[str, float]:
    """`validation/teacher_accuracy`, and the greedy one where it is asked for: means over the teachers.

    Each answers the prompts of its own tasks, sampled by the hf engine in this process; one behind a server, and tasks
    of agents, are left out.
    """
    by_teacher: list[dict[str, float]] = []
    for key, path in teacher_paths.items():
        section, own = config.teacher_sections[key], _validation_prompts(key, config, inputs)
        if section.server is not None or not own:
            continue
        from nemo_rl.generation.hf import HFGeneration  # loads transformers' models

        encoder = ChatEncoder(
            teacher_tokenizer(key, section, path), chat_template_kwargs=section.tokenizer.chat_template_kwargs
        )
        engine = HFGeneration(path, dtype=section.precision, max_model_len=config.policy.max_total_sequence_length)
        try:
            asked = replace(
                context,
                generation=engine,
                encoder=encoder,
                sampling=make_sampling(config, encoder.stop_token_ids),
            )
            validator = make_validator(config, replace(inputs, validation=own), asked)
            assert validator is not None
            metrics = (await validator.validate()).metrics
        finally:
            await engine.close()
        by_teacher.append({name: metrics[name] for name in REPORTED_METRICS if name in metrics})
        shown = ", ".join(f"{name} {value:.3f}" for name, value in by_teacher[-1].items())
        logger.info("%s (%s) on the validation set: %s", key, section.model_name, shown)
    return {
        f"validation/teacher_{name}": sum(each[name] for each in reporting_teachers) / len(reporting_teachers)
        for name in REPORTED_METRICS
        if (reporting_teachers := [each for each in by_teacher if name in each])
    }


def _validation_prompts(key: str, config: TrainingRunConfig, inputs: Inputs) -> tuple[PromptSet, ...]:
    """The validation prompts of the teacher's tasks."""
    tasks = {
        task
        for task, section in config.env.items()
        if config.teacher_key(task) == key and not isinstance(section, AgentConfig | NemoGymConfig)
    }
    sets = (PromptSet(s.name, [p for p in s.prompts if p.task_name in tasks]) for s in inputs.validation)
    return tuple(one for one in sets if one.prompts)
