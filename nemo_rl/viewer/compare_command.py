"""`nemo-rl compare`."""

import argparse
import json

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nemo_rl.command_line import Command, ExitCode, path_argument
from nemo_rl.observability.console import configure_logging
from nemo_rl.viewer import compare
from nemo_rl.viewer.charts import format_number
from nemo_rl.viewer.viewer_sources import ViewerSource


def _add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", nargs="+", type=path_argument, metavar="RUN", help="runs, or collections; the first is the base"
    )
    parser.add_argument("--json", type=path_argument, metavar="FILE", help="also write the comparison there")


def _compare(parsed: argparse.Namespace) -> ExitCode:
    configure_logging()
    opened = [ViewerSource.open(path) for path in parsed.paths]
    for number, source in enumerate(opened):
        if any(source.id == other.id for other in opened[:number]):
            source.id = str(parsed.paths[number])
    result = compare.compare(opened)
    console = Console(highlight=False)
    if result.config:
        table = Table("key", *map(escape, result.names), title="configuration")
        for key, values in result.config:
            table.add_row(escape(key), *map(escape, values))
        console.print(table)
    table = Table("quantity", result.names[0], "other", "difference", "95% interval", "pairs", title="differences")
    for each in result.differences:
        numbers = ["–" if n is None else format_number(n) for n in (each.first, each.second, each.difference)]
        interval = (
            "–" if each.low is None or each.high is None else f"{format_number(each.low)} to {format_number(each.high)}"
        )
        of = f" of {each.other}" if len(result.names) > 2 else ""
        name = escape(each.quantity + of) + (" *" if each.is_significant else "")
        table.add_row(name, *numbers, interval, str(each.num_pairs))
    console.print(table)
    if parsed.json:
        parsed.json.write_text(json.dumps(compare.to_dict(result), indent=2, ensure_ascii=False) + "\n")
    return ExitCode.DONE


COMPARE = Command(
    "Compare runs, or collections, with the first: configuration, paired differences (*: the interval excludes 0).",
    _add_compare_arguments,
    _compare,
    program="nemo-rl compare",
    reported_errors=(OSError,),
)
