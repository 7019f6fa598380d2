"""`nemo-rl plan`: what a traced run would take under other values of the keys that order its work."""

import argparse
import difflib
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nemo_rl.command_line import Command, ExitCode, path_argument
from nemo_rl.errors import ConfigError
from nemo_rl.trace.advice import DEFAULT_MAX_NUM_SEQS, lookup
from nemo_rl.trace.plan import Planned, Schedule, plan
from nemo_rl.trace.timeline import Timeline
from nemo_rl.trace.trace_command import read_run_config
from nemo_rl.trace.workload import ENVIRONMENT, SCORER, Limits, fit_workload

DEFAULT_STEPS = 12
MAX_PLANS = 256
MAX_VALUE = 1_000_000

Values = Mapping[str, int | bool]  # of keys


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys that the planner knows, for a run's configuration."""

    config: Mapping[str, Any]

    @property
    def algorithm(self) -> str:
        return "distillation" if "distillation" in self.config else "grpo"

    @property
    def background(self) -> str:
        return f"{self.algorithm}.async_rollouts" if self.algorithm == "distillation" else "grpo.async_grpo"

    @property
    def calls(self) -> dict[str, tuple[str, int]]:
        """Return keys that limit calls, with the name of the wait and the rollouts of one call."""
        found = {}
        for section, prefix in (("env", ENVIRONMENT), ("scorers", SCORER)):
            for name, entry in (lookup(self.config, section) or {}).items():
                for key in ("batching.max_calls", "limits.max_concurrency", "num_replicas"):
                    if isinstance(entry, Mapping) and isinstance(lookup(entry, key), int):
                        size = lookup(entry, "batching.max_batch_size") if lookup(entry, "batching.enabled") else 1
                        found[f"{section}.{name}.{key}"] = prefix + name, int(size)
        return found

    @property
    def present(self) -> dict[str, int | bool]:
        """Return all keys with the run's values."""
        values: dict[str, Any] = {
            f"{self.algorithm}.num_prompts_per_step": self._get(f"{self.algorithm}.num_prompts_per_step"),
            f"{self.algorithm}.num_generations_per_prompt": self._get(f"{self.algorithm}.num_generations_per_prompt"),
            f"{self.background}.enabled": bool(lookup(self.config, f"{self.background}.enabled")),
            f"{self.background}.max_trajectory_age_steps": self._get(f"{self.background}.max_trajectory_age_steps"),
            "policy.generation.num_replicas": self._get("policy.generation.num_replicas"),
            "policy.generation.vllm_cfg.max_num_seqs": self._get(
                "policy.generation.vllm_cfg.max_num_seqs", DEFAULT_MAX_NUM_SEQS
            ),
            "policy.train_micro_batch_size": self._get("policy.train_micro_batch_size"),
        }
        return values | {key: self._get(key) for key in self.calls}

    def _get(self, key: str, otherwise: int = 1) -> int:
        value = lookup(self.config, key)
        return value if isinstance(value, int) else otherwise

    def schedule(self, values: Values) -> Schedule:
        """Return what the values ask for."""
        micro_batch = "policy.train_micro_batch_size"
        calls: dict[str, int] = {}
        for key, (wait, size) in self.calls.items():
            calls[wait] = min(values[key] * size, calls.get(wait, MAX_VALUE))
        return Schedule(
            num_prompts=values[f"{self.algorithm}.num_prompts_per_step"],
            num_generations=values[f"{self.algorithm}.num_generations_per_prompt"],
            age=values[f"{self.background}.max_trajectory_age_steps"] if values[f"{self.background}.enabled"] else None,
            num_engines=values["policy.generation.num_replicas"],
            max_num_seqs=values["policy.generation.vllm_cfg.max_num_seqs"],
            calls=calls,
            micro_batch_scale=values[micro_batch] / self.present[micro_batch],
        )


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=path_argument, metavar="RUN", help="a run's directory, with a trace")
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=VALUE,...",
        help="values to plan for; with several keys, each with each",
    )
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, help=f"planned steps; default: {DEFAULT_STEPS}")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")


def _plan(parsed: argparse.Namespace) -> ExitCode:
    if not 2 <= parsed.steps <= 10_000:
        raise ConfigError("--steps", parsed.steps, "must be from 2 to 10000: the first step is left out")
    config = read_run_config(parsed.run)
    keys = _Keys(config)
    sweep = dict(_read_sweep(parsed.sweep, keys.present))
    timeline = Timeline.read(parsed.run)
    traced = keys.schedule(keys.present)
    limits = Limits(traced.max_num_seqs, traced.num_engines, traced.calls)
    try:
        workload = fit_workload(timeline, limits)
    except ValueError as error:
        raise ConfigError("RUN", str(parsed.run), str(error)) from error
    rows = [
        (values, plan(workload, keys.schedule(keys.present | values), num_steps=parsed.steps))
        for values in _combinations(sweep)
    ]
    sys.stdout.write(_to_json(rows) if parsed.json else format_plans(rows))
    return ExitCode.DONE


def _read_sweep(arguments: Sequence[str], present: Values) -> Iterator[tuple[str, list[int | bool]]]:
    """Yield keys with their values; raises ConfigError for an unknown key and for a bad value."""
    for argument in arguments:
        key, _, text = argument.partition("=")
        if key not in present:
            nearest = difflib.get_close_matches(key, present, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"it knows {', '.join(sorted(present))}"
            raise ConfigError("--sweep", key, f"is no key of the planner; {hint}")
        yield key, [_read_value(key, word, present[key]) for word in text.split(",")]


def _read_value(key: str, word: str, like: int | bool) -> int | bool:
    if isinstance(like, bool):
        if word not in ("true", "false"):
            raise ConfigError("--sweep", f"{key}={word}", "must be true or false")
        return word == "true"
    lowest = 0 if key.endswith("max_trajectory_age_steps") else 1
    if not word.isascii() or not word.isdigit() or not lowest <= int(word[:9]) <= MAX_VALUE or len(word) > 7:
        raise ConfigError("--sweep", f"{key}={word}", f"must be a whole number from {lowest} to {MAX_VALUE}")
    return int(word)


def _combinations(sweep: Mapping[str, Sequence[int | bool]]) -> list[dict[str, int | bool]]:
    """Return the run's own values (an empty dictionary), then each combination."""
    count = 1
    for values in sweep.values():
        count *= len(values)
    if count > MAX_PLANS:
        raise ConfigError("--sweep", count, f"combinations; at most {MAX_PLANS}")
    products = [dict(zip(sweep, values, strict=True)) for values in itertools.product(*sweep.values())]
    return [{}, *(each for each in products if each)]


def format_plans(rows: Sequence[tuple[Values, Planned]]) -> str:
    """Return the table of plans, the run's own first."""
    names = [", ".join(f"{key}={_word(value)}" for key, value in values.items()) or "as it ran" for values, _ in rows]
    width = max(map(len, names))
    head = f"{'':<{width}}  {'step s':>8}  {'trainer':>8}  {'engine':>8}  {'tokens/s':>9}  longest wait\n"
    return head + "".join(_row(name, width, each) for name, (_, each) in zip(names, rows, strict=True))


def _row(name: str, width: int, planned: Planned) -> str:
    bubbles = planned.bubbles
    cause, seconds = next(iter(bubbles.waits_s.items()), ("none", 0.0))
    return (
        f"{name:<{width}}  {planned.step_s:>8.3g}  {bubbles.trainer_busy_share:>8.0%}  "
        f"{bubbles.engine_busy_share:>8.0%}  {planned.tokens_per_s:>9.4g}  {cause}, {seconds:.3g} s\n"
    )


def _word(value: int | bool) -> str:
    return str(value).lower()


def _to_json(rows: Sequence[tuple[Values, Planned]]) -> str:
    return json.dumps([{"keys": values, **asdict(planned)} for values, planned in rows]) + "\n"


PLAN = Command(
    "Plan a traced run's work under other values of its keys, by its own schedulers on a virtual clock.",
    _add_plan_arguments,
    _plan,
    program="nemo-rl plan",
)
