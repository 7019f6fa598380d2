"""`nemo-rl trace`."""

import argparse
import json
import sys
from dataclasses import asdict

from nemo_rl.command_line import Command, ExitCode, path_argument
from nemo_rl.errors import ConfigError
from nemo_rl.observability.trace_file import TRACE_FILE
from nemo_rl.trace.advice import Advice
from nemo_rl.trace.bubbles import Bubbles, count_bubbles
from nemo_rl.trace.planned_advice import advise_with_plans
from nemo_rl.trace.run_config import read_run_config
from nemo_rl.trace.timeline import Timeline


def _add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=path_argument, metavar="RUN", help="a run's directory")
    parser.add_argument("--json", action="store_true", help="print the table and the advice as JSON")


def _trace(parsed: argparse.Namespace) -> ExitCode:
    timeline = Timeline.read(parsed.run)
    bubbles = count_bubbles(timeline)
    if bubbles is None:
        raise ConfigError("RUN", str(parsed.run), "its trace has no whole training step")
    advice = advise_with_plans(bubbles, timeline, read_run_config(parsed.run))
    if parsed.json:
        sys.stdout.write(json.dumps({"bubbles": asdict(bubbles), "advice": [asdict(a) for a in advice]}) + "\n")
    else:
        sys.stdout.write(format_table(bubbles) + "\n" + format_advice(advice, bubbles))
        sys.stdout.write(f"Timeline   {parsed.run / TRACE_FILE}, for https://ui.perfetto.dev\n")
    return ExitCode.DONE


def table_rows(bubbles: Bubbles) -> list[tuple[str, float]]:
    """Return the rows of the table: their names, and seconds of a step."""
    return [
        ("trainer busy", bubbles.trainer_busy_s),
        *((f"  waits: {cause}", seconds) for cause, seconds in bubbles.waits_s.items()),
        ("  in no phase", bubbles.unaccounted_s),
        ("engine busy", bubbles.engine_busy_s),
    ]


def format_table(bubbles: Bubbles) -> str:
    """Return the table: seconds of a step and their share."""
    rows = table_rows(bubbles)
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {_s(seconds):>8} s  {seconds / bubbles.step_s:6.1%}" for name, seconds in rows]
    links = [
        f"{'longest link' if i == 0 else '':<{width}}  {_s(s.seconds):>8} s  {s.cause}"
        for i, s in enumerate(bubbles.longest)
    ]
    head = f"{'a step, mean of ' + str(bubbles.num_steps):<{width}}  {_s(bubbles.step_s):>8} s"
    return "\n".join([head, *lines, *links]) + "\n"


def format_advice(advice: list[Advice], bubbles: Bubbles) -> str:
    if not advice:
        return "Turn       nothing: no wait takes a twentieth of a step\n"
    return "".join(
        f"{'Turn' if i == 0 else '':<11}{each.change}\n"
        f"{'':11}{each.reason}; {'planned: ' if each.is_planned else 'about '}{_s(each.gain_s)} s "
        f"less of {_s(bubbles.step_s)} s\n"
        for i, each in enumerate(advice)
    )


def _s(seconds: float) -> str:
    return f"{seconds:.3g}"


TRACE = Command(
    "Show where the time of a run's steps went, and which key moves it; the run needs logger.trace.enabled=true.",
    _add_trace_arguments,
    _trace,
    program="nemo-rl trace",
)
