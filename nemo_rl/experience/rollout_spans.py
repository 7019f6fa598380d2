"""The span of a rollout, which holds all that it waits for."""

from nemo_rl.experience.turns import RolloutJob
from nemo_rl.tracing import ROLLOUT, AnySpan, span
from nemo_rl.types import Trajectory

ROLLOUTS = "rollouts"  # the track


def begin_rollout_span(job: RolloutJob) -> AnySpan:
    """Begin the span of a rollout, in a lane of its own."""
    prompt = job.prompt
    return span(ROLLOUT, ROLLOUTS, env=prompt.env, group=job.group_id, generation=job.generation_index)


def end_rollout_span(span: AnySpan, trajectory: Trajectory) -> None:
    """End it with the size and the end of the rollout, never with its text."""
    attributes = {"failure": str(trajectory.failure.failure_class)} if trajectory.failure else {}
    span.end(
        stop_reason=str(trajectory.stop_reason),
        num_turns=trajectory.num_turns,
        num_sampled_tokens=trajectory.num_generated_tokens,
        weight_version=trajectory.weight_versions[1],
        **attributes,
    )
