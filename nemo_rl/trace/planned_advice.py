"""Planned effect of an advice: the run's own work under the values that it names."""

from collections.abc import Sequence
from dataclasses import replace

from nemo_rl.errors import ConfigError
from nemo_rl.trace.advice import Advice, advise
from nemo_rl.trace.bubbles import Bubbles
from nemo_rl.trace.run_config import Config
from nemo_rl.trace.timeline import Timeline

NUM_STEPS = 8
MAX_PLANNED = 4  # pieces of advice; the gains of the others stay estimates


def advise_with_plans(bubbles: Bubbles, timeline: Timeline, config: Config) -> list[Advice]:
    """Return advice with the gains that the planner expects, the largest first; others keep their estimates."""
    return _plan_gains(advise(bubbles, timeline, config), timeline, config)


def _plan_gains(advice: Sequence[Advice], timeline: Timeline, config: Config) -> list[Advice]:
    """Return the advice with planned gains.

    A gain is per rollout: of a step that becomes larger it is the part that a step of the present size saves.
    """
    from nemo_rl.trace.plan import fit_to_run, plan  # training's schedulers, which load torch
    from nemo_rl.trace.planner_keys import PlannerKeys

    keys = PlannerKeys(config)
    present = keys.present
    try:
        before = keys.schedule(present)
        workload = fit_to_run(timeline, keys.limits, before)
        before_s = plan(workload, before, num_steps=NUM_STEPS).step_s
    except (ValueError, ConfigError):  # no rollouts, or a configuration that is not the run's
        return list(advice)
    found = []
    for place, each in enumerate(advice):
        if place < MAX_PLANNED and each.values and each.values.keys() <= present.keys():
            schedule = keys.schedule({**present, **each.values})
            larger = schedule.num_prompts / before.num_prompts
            after_s = plan(workload, schedule, num_steps=NUM_STEPS).step_s / larger
            found.append(replace(each, gain_s=max(before_s - after_s, 0.0), is_planned=True))
        else:
            found.append(each)
    return sorted(found, key=lambda each: -each.gain_s)
