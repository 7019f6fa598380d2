"""What the tests of the rollout layer run with; each test names what matters to it."""

from collections.abc import Mapping, Sequence

from nemo_rl.data.chat import ChatEncoder
from nemo_rl.environments.boundary import CheckedEnvironment
from nemo_rl.experience.rollout_dependencies import RolloutDependencies, RolloutLimits, RolloutOptions
from nemo_rl.experience.scoring import Scoring
from nemo_rl.experience.turns import RolloutJob
from nemo_rl.interfaces import Environment, Generation
from nemo_rl.types import Message, Prompt, SamplingParams
from tests.fakes.encoder import END, FakeEncoder

LIMITS = RolloutLimits(max_turns=4, max_total_length=80, max_retries=2, retry_backoff_s=0.0)
SAMPLING = SamplingParams(max_new_tokens=12, stop_token_ids=(END,))
OPTIONS = RolloutOptions(SAMPLING, seed=7)
VOCAB_SIZE = 6  # of the fake engine: it ends its turns soon


def prompt(number: int, task_name: str = "game") -> Prompt:
    return Prompt(f"p{number}", task_name, (Message("user", f"question{number}"),), {"number": number})


def jobs(num_prompts: int, num_generations: int = 1, tasks: Sequence[str] = ("game",)) -> list[RolloutJob]:
    prompts = [prompt(i, tasks[i % len(tasks)]) for i in range(num_prompts)]
    return [RolloutJob(p, f"0:{p.prompt_id}", index) for p in prompts for index in range(num_generations)]


def check_environment(environment: Environment) -> CheckedEnvironment:
    return environment if isinstance(environment, CheckedEnvironment) else CheckedEnvironment(environment, 60.0)


def dependencies(
    generation: Generation,
    environments: Mapping[str, Environment],  # checked here
    *,
    limits: RolloutLimits = LIMITS,
    encoder: ChatEncoder | None = None,
    scoring: Scoring | None = None,
) -> RolloutDependencies:
    checked = {name: check_environment(environment) for name, environment in environments.items()}
    return RolloutDependencies(generation, checked, encoder or FakeEncoder(), limits, scoring=scoring or Scoring())
