"""Trials of environments and reward functions: a recipe's own ones, played on some of its prompts without a policy."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import islice
from typing import Any

from nemo_rl.config.environment import CustomEnvironmentConfig, CustomScorerConfig
from nemo_rl.config.master import RolloutRunConfig, TrainingRunConfig
from nemo_rl.data.chat import ChatEncoder, TextOnlyChatEncoder
from nemo_rl.data.prompt_sets import load_input, load_prompt_sets
from nemo_rl.environments.scorers.function_scorer import FunctionScorerConfig
from nemo_rl.errors import NemoRLError
from nemo_rl.experience.rollout_dependencies import RolloutDependencies, RolloutOptions
from nemo_rl.experience.rollout_dispatch import run_training_rollouts
from nemo_rl.experience.turns import RolloutJob
from nemo_rl.generation.requests import as_completed
from nemo_rl.interfaces import Generation
from nemo_rl.launch.rollout_layer import open_environments, open_scorers
from nemo_rl.launch.sampling import make_limits, make_sampling
from nemo_rl.types import Completion, GenerationRequest, Prompt, Trajectory
from nemo_rl.weight_manifests import Weights

WRONG_ANSWERS = ("I do not know.", "")  # said by the scripted model beside the reference answer
TRIAL_ROWS = 4  # rows on which a recipe's own code is tried
TRIAL_S = 60.0  # limit of such a trial


class ScriptedGeneration(Generation):
    """A model whose answers are written here: a prompt's reference answer, then wrong ones, by generation index."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        """Read the reference answers; the group of the prompt at index i is named i."""
        self._references = {str(i): str(prompt.env_state.get("answer", "")) for i, prompt in enumerate(prompts)}

    @property
    def is_async(self) -> bool:
        return True

    def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Any]:
        return as_completed(requests, self._answer)

    async def _answer(self, request: GenerationRequest) -> Completion:
        group, _, index = request.session_id.rpartition(":")
        answers = (self._references[group], *WRONG_ANSWERS)
        return Completion(request.request_id, (), (), "stop", text=answers[int(index) % len(answers)])

    async def pause(self, *, keep_cache: bool = False) -> None:
        """Do nothing, as in all that follows: there is no model."""

    async def resume(self) -> None: ...

    async def update_weights(self, manifest: Weights, weight_version: int) -> None: ...

    async def close(self) -> None: ...


def find_prompts(config: RolloutRunConfig, count: int, tasks: frozenset[str]) -> list[Prompt]:
    """Return the first prompts whose environment is one of `tasks`; raises ConfigError or DataError."""
    if isinstance(config, TrainingRunConfig):
        prompts: Sequence[Prompt] = load_prompt_sets(config.data, config.seed)[0].prompts
    else:
        prompts = load_input(config.data).prompts  # pyright: ignore[reportArgumentType] - all others are collections
    return list(islice((prompt for prompt in prompts if prompt.task_name in tasks), count))


async def play(
    config: RolloutRunConfig,
    prompts: Sequence[Prompt],
    *,
    generations: int,
    generation: Generation | None = None,
    encoder: ChatEncoder | None = None,
) -> tuple[Trajectory, ...]:
    """Play each prompt `generations` times against a model, None for the scripted one; failures are in the result.

    The environments and scorers are those of `config`, called as in training. Raises ConfigError for one that cannot
    be made.
    """
    jobs = [RolloutJob(prompt, str(i), index) for i, prompt in enumerate(prompts) for index in range(generations)]
    async with AsyncExitStack() as stack:
        dependencies = RolloutDependencies(
            ScriptedGeneration(prompts) if generation is None else generation,
            open_environments(config, stack),
            TextOnlyChatEncoder() if encoder is None else encoder,
            make_limits(config),
            scoring=await open_scorers(config, stack),
        )
        sampling = make_sampling(config, () if encoder is None else encoder.stop_token_ids)
        return await run_training_rollouts(jobs, dependencies, RolloutOptions(sampling, seed=0))


def find_environment_problems(config: RolloutRunConfig) -> dict[str, str]:
    """Return the problems of a recipe's own environments and reward functions, by key; built-in ones are not called.

    A key is named if all of its calls fail, or cannot be made.
    """
    problems = {}
    for name, section in config.env.items():
        own_scorers = [each for each in section.scorers if _is_own(config.scorers[each])]
        if name not in config.runner_sections and (_is_own(section) or own_scorers):
            kept = section.model_copy(update={"scorers": own_scorers})
            tried = config.model_copy(update={"env": {name: kept}, "scorers": _select(config.scorers, own_scorers)})
            if problem := _try_environment(tried, name):
                problems[f"env.{name}"] = problem
    return problems


def _is_own(section: object) -> bool:
    return isinstance(section, CustomEnvironmentConfig | CustomScorerConfig | FunctionScorerConfig)


def _select(sections: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: sections[name] for name in names}


def _try_environment(config: RolloutRunConfig, name: str) -> str | None:
    async def trial() -> tuple[Trajectory, ...]:
        async with asyncio.timeout(TRIAL_S):
            return await play(config, prompts, generations=len(WRONG_ANSWERS) + 1)

    try:
        prompts = find_prompts(config, TRIAL_ROWS, frozenset({name}))
        rollouts = asyncio.run(trial()) if prompts else ()
    except TimeoutError:
        return f"its calls on {TRIAL_ROWS} rows have not ended after {TRIAL_S:g} s"
    except NemoRLError as error:
        return str(error)
    failures = [rollout.failure for rollout in rollouts if rollout.failure is not None]
    if not failures or len(failures) < len(rollouts):
        return None
    return f"all {len(rollouts)} calls fail, the first with {failures[0].cause} ({failures[0].origin})"


def split_answers(trajectories: Sequence[Trajectory]) -> tuple[list[float], list[float]]:
    """Return the rewards of the scripted model's reference answers, and those of its wrong answers."""
    rewarded = [each for each in trajectories if each.failure is None]
    count = len(WRONG_ANSWERS) + 1
    right = [each.reward for each in rewarded if each.generation_index % count == 0]
    return right, [each.reward for each in rewarded if each.generation_index % count]


def with_own_environment(config: RolloutRunConfig, name: str) -> RolloutRunConfig:
    """Return the configuration with the environment `name` alone."""
    section = config.env[name]
    return config.model_copy(update={"env": {name: section}, "scorers": _select(config.scorers, section.scorers)})
