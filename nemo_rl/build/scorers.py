"""The scorers of a run from its configuration."""

from contextlib import AsyncExitStack

from nemo_rl.config.master import GRPOConfig
from nemo_rl.environments.scorers.registry import make_scorer
from nemo_rl.experience.scoring import Scoring, WeightedScorer


def open_scorers(config: GRPOConfig, stack: AsyncExitStack) -> Scoring:
    """Make every scorer once, closed with `stack`, and give each task its own; raises ConfigError."""
    scorers: dict[str, WeightedScorer] = {}
    for name, section in config.scorers.items():
        scorer = make_scorer(name, section)
        stack.push_async_callback(scorer.close)
        scorers[name] = WeightedScorer(name, scorer, section.weight)
    return Scoring({task: tuple(scorers[name] for name in section.scorers) for task, section in config.env.items()})
