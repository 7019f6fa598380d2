"""`nemo-rl plan`: what a traced run would take under other values of the keys that order its work."""

import argparse
import difflib
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from nemo_rl.command_line import Command, ExitCode, path_argument
from nemo_rl.config.loading import load_config, resolved_values
from nemo_rl.config.master import TrainingRunConfig
from nemo_rl.device_peaks import DEVICE_NAMES, peaks_of
from nemo_rl.errors import ConfigError
from nemo_rl.launch.model_files import find_shape
from nemo_rl.policy.memory import UnknownShapeError
from nemo_rl.recipes import find_recipe
from nemo_rl.trace.bubbles import NUM_WARM_UP_STEPS, count_bubbles
from nemo_rl.trace.plan import Planned, fit_to_run, plan
from nemo_rl.trace.planner_keys import MAX_VALUE, PlannerKeys, Values
from nemo_rl.trace.run_config import read_run_config
from nemo_rl.trace.stated_peaks import StatedDevices, state_workload
from nemo_rl.trace.timeline import Timeline
from nemo_rl.trace.workload import Workload

DEFAULT_STEPS = 12
MAX_PLANS = 256
MAX_COMPARED_STEPS = 100
PRESENT = "as it is"  # name of the plan with the run's or the recipe's own values
DEFAULT_TOKENS = 1000  # tokens per response of a recipe that has not run


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", type=path_argument, metavar="RUN", help="a run's directory, with a trace; or a recipe, with --device"
    )
    parser.add_argument("--device", metavar="NAME", help="of a recipe that has not run: H100, H200, A100, ...")
    parser.add_argument(
        "--tokens", type=int, default=DEFAULT_TOKENS, help=f"of a mean response of a recipe; default: {DEFAULT_TOKENS}"
    )
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=VALUE,...",
        help="values to plan for; with several keys, each with each",
    )
    parser.add_argument(
        "--against",
        action="append",
        default=[],
        type=path_argument,
        metavar="RUN",
        help="a traced run of other values of these keys: show what is planned for it beside what it took",
    )
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, help=f"planned steps; default: {DEFAULT_STEPS}")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")


def _plan(parsed: argparse.Namespace) -> ExitCode:
    if not 2 <= parsed.steps <= 10_000:
        raise ConfigError("--steps", parsed.steps, "must be from 2 to 10000: the first step is left out")
    is_recipe = not parsed.run.is_dir()
    recipe = _read_recipe(parsed) if is_recipe else None
    keys = PlannerKeys(read_run_config(parsed.run) if recipe is None else resolved_values(recipe))
    sweep = dict(_read_sweep(parsed.sweep, keys.present))
    workload = _fit(parsed.run, keys) if recipe is None else _state(recipe, keys, parsed)
    rows = [
        (values, plan(workload, keys.schedule(keys.present | values), num_steps=parsed.steps))
        for values in _combinations(sweep)
    ]
    measured = [_compare(run, keys, workload) for run in parsed.against]
    text = _to_json(rows, measured) if parsed.json else format_plans(rows) + format_comparisons(measured)
    sys.stdout.write(text)
    return ExitCode.DONE


@dataclass(frozen=True, slots=True)
class Comparison:
    """A traced run, and what is planned for its values from the trace of another."""

    run: str
    values: Values  # values that differ from the planned run's
    planned_s: float  # seconds per step
    measured_s: float

    @property
    def error(self) -> float:
        return self.planned_s / self.measured_s - 1


def _compare(run: Path, keys: PlannerKeys, workload: Workload) -> Comparison:
    """Plan the values of another run; raises ConfigError if it has no trace of a whole step."""
    present, bubbles = keys.present, count_bubbles(Timeline.read(run))
    if bubbles is None:
        raise ConfigError("--against", str(run), "its trace has no whole training step")
    own = PlannerKeys(read_run_config(run)).present
    values = {key: value for key, value in own.items() if key in present and value != present[key]}
    num_steps = min(bubbles.num_steps + NUM_WARM_UP_STEPS, MAX_COMPARED_STEPS)  # the last ones collect no more rollouts
    planned = plan(workload, keys.schedule(present | values), num_steps=num_steps)
    return Comparison(run.name, values, planned.step_s, bubbles.step_s)


def format_comparisons(comparisons: Sequence[Comparison]) -> str:
    """Return a line for each run, below the table."""
    return "".join(
        f"{each.run}: planned {each.planned_s:.3g} s, took {each.measured_s:.3g} s ({each.error:+.1%})\n"
        for each in comparisons
    )


def _fit(run: Path, keys: PlannerKeys) -> Workload:
    """Return the work of a traced run."""
    try:
        return fit_to_run(Timeline.read(run), keys.limits, keys.schedule(keys.present))
    except ValueError as error:
        raise ConfigError("RUN", str(run), str(error)) from error


def _read_recipe(parsed: argparse.Namespace) -> TrainingRunConfig:
    recipe = load_config(find_recipe(parsed.run))
    if parsed.device is None:
        raise ConfigError("--device", None, "a recipe has no trace; name the device to plan for, such as H100")
    if not 1 <= parsed.tokens <= MAX_VALUE:
        raise ConfigError("--tokens", parsed.tokens, f"must be from 1 to {MAX_VALUE}")
    return recipe


def _state(recipe: TrainingRunConfig, keys: PlannerKeys, parsed: argparse.Namespace) -> Workload:
    """Return the work that a recipe lets expect on a device."""
    peaks = peaks_of(parsed.device)
    if peaks is None:
        raise ConfigError("--device", parsed.device, f"has no stated peaks; allowed: {', '.join(DEVICE_NAMES)}")
    policy = recipe.policy
    try:
        shape = find_shape("policy.model_name", policy.model_name, policy.hf_config_overrides)
    except UnknownShapeError as error:
        raise ConfigError("policy.model_name", policy.model_name, str(error)) from error
    devices = StatedDevices(peaks, keys.num_train_devices, keys.gpus_per_engine)
    return state_workload(recipe, shape, devices, parsed.tokens)


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
    names = [", ".join(f"{key}={_word(value)}" for key, value in values.items()) or PRESENT for values, _ in rows]
    width = max(map(len, names))
    columns = f"{'step s':>8}  {'trainer':>8}  {'engine':>8}  {'tokens/s':>9}  {'tokens/device-hour':>18}"
    head = f"{'':<{width}}  {columns}  longest wait\n"
    return head + "".join(_row(name, width, each) for name, (_, each) in zip(names, rows, strict=True))


def _row(name: str, width: int, planned: Planned) -> str:
    bubbles = planned.bubbles
    cause, seconds = next(iter(bubbles.waits_s.items()), ("none", 0.0))
    return (
        f"{name:<{width}}  {planned.step_s:>8.3g}  {bubbles.trainer_busy_share:>8.0%}  "
        f"{bubbles.engine_busy_share:>8.0%}  {planned.tokens_per_s:>9.4g}  {planned.tokens_per_device_hour:>18.4g}  "
        f"{cause}, {seconds:.3g} s\n"
    )


def _word(value: int | bool) -> str:
    return str(value).lower()


def _to_json(rows: Sequence[tuple[Values, Planned]], comparisons: Sequence[Comparison]) -> str:
    found = [
        {"keys": values, **asdict(planned), "tokens_per_device_hour": planned.tokens_per_device_hour}
        for values, planned in rows
    ]
    return json.dumps([*found, *(asdict(each) | {"error": each.error} for each in comparisons)]) + "\n"


PLAN = Command(
    "Plan a traced run's work under other values of its keys, by its own schedulers on a virtual clock.",
    _add_plan_arguments,
    _plan,
    program="nemo-rl plan",
)
