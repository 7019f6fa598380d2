"""A training step of every policy of a run: of its only one, or of each of several on its own view of the rollouts."""

from collections.abc import Mapping
from dataclasses import replace

from nemo_rl.algorithms.stages import StepBatch
from nemo_rl.algorithms.training_run import TrainingRun
from nemo_rl.errors import RolloutError
from nemo_rl.experience.assembly import describe_first_failure
from nemo_rl.experience.policy_views import view_groups
from nemo_rl.observability.loggers import StepTimer
from nemo_rl.types import CollectedGroups

# counts of a step, which are sums over its policies; other metrics without a policy's name are those of the first
SUMMED_METRICS = frozenset(
    {
        "global_valid_seqs",
        "global_valid_toks",
        "num_optimizer_steps",
        "num_skipped_steps",
        "num_valid_samples",
        "total_num_tokens",
        "train_flops",
    }
)


async def make_batches(run: TrainingRun, collected: CollectedGroups, timer: StepTimer) -> dict[str, StepBatch]:
    """Return the batch of each policy that has groups to train on; raises RolloutError if none has.

    All batches are made before any policy is trained, so that an error leaves all policies at the same step.
    """
    if list(run.algorithms) == [""]:
        return {"": await run.algorithms[""].make_batch(collected, timer)}
    batches = {}
    for name, algorithm in run.algorithms.items():
        if groups := view_groups(collected.groups, name, min_group_size=run.config.min_group_size):
            await run.policy.select(name)
            batches[name] = await algorithm.make_batch(replace(collected, groups=groups, metrics={}), timer)
    if not batches:
        cause = describe_first_failure(collected.groups)
        raise RolloutError(f"nothing to train on: no policy of {', '.join(run.algorithms)} has a rollout{cause}")
    return batches


async def train_policies(run: TrainingRun, batches: Mapping[str, StepBatch]) -> dict[str, dict[str, float]]:
    """Train each policy on its batch; return the metrics of batch and training by policy."""
    metrics = {}
    for name, made in batches.items():
        if name:
            await run.policy.select(name)
        metrics[name] = made.metrics | await run.policy.train_step(made.batch, run.algorithms[name].loss_fn)
    return metrics


def merge_policy_metrics(
    by_policy: Mapping[str, Mapping[str, float]], collected: Mapping[str, float]
) -> dict[str, float]:
    """Return the metrics of a step: those of a run's only policy, or of each of several as `policies/<policy>/...`.

    Of several, metrics without a name are those of the first, except for counts, which are sums.

    Example: {"a": {"loss": 1, "total_num_tokens": 5}, "b": {"loss": 2, "total_num_tokens": 6}} gives loss 1,
    total_num_tokens 11, policies/a/loss 1, policies/b/loss 2 and so on.
    """
    if list(by_policy) == [""]:
        return dict(by_policy[""])
    first = next(iter(by_policy.values()))
    sums = {name: sum(own.get(name, 0.0) for own in by_policy.values()) for name in SUMMED_METRICS & first.keys()}
    named = {f"policies/{policy}/{name}": value for policy, own in by_policy.items() for name, value in own.items()}
    return {**collected, **first, **sums, **named}
