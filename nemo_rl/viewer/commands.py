"""`nemo-rl view`, `nemo-rl compare` and `nemo-rl check`."""

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nemo_rl.commands import Command, ExitCode
from nemo_rl.errors import ConfigError
from nemo_rl.observability.console import configure_logging
from nemo_rl.viewer import check, compare, server, site
from nemo_rl.viewer.charts import format_number
from nemo_rl.viewer.conversation import show
from nemo_rl.viewer.sources import Source, Sources, find_kind


def _add_view_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="runs, collections, or directories of them")
    parser.add_argument("--host", default="127.0.0.1", help="a loopback address (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument(
        "--export", type=Path, metavar="DIR", help="write the pages there instead, to open from the disk"
    )
    parser.add_argument("--max-pages", type=int, default=site.MAX_PAGES, help="of an export (default: %(default)s)")
    parser.add_argument("--group", metavar="ID", help="export one group of a run as one file, DIR/group.html")
    parser.add_argument("--step", type=int, help="the training step of --group")


def _view(parsed: argparse.Namespace) -> ExitCode:
    configure_logging()
    if parsed.group and not parsed.export:
        raise ConfigError("--group", parsed.group, "needs --export DIR to write to")
    sources = Sources.open(parsed.paths or [Path("runs")])
    if parsed.export:
        return _export(sources, parsed)
    with contextlib.suppress(KeyboardInterrupt):  # before the server listens
        asyncio.run(_serve(sources, parsed.host, parsed.port))
    sys.stderr.write("stopped\n")
    return ExitCode.DONE


def _export(sources: Sources, parsed: argparse.Namespace) -> ExitCode:
    for source in sources.by_id.values():
        source.complete()
    if parsed.group:
        if len(sources.by_id) != 1:
            raise ConfigError("PATH", ", ".join(sources.by_id), "name the one run that --group is of")
        path = parsed.export / "group.html"
        site.export_group(sources, next(iter(sources.by_id)), parsed.group, parsed.step, path)
        sys.stdout.write(f"{path}\n")
        return ExitCode.DONE
    count = site.export(sources, parsed.export, max_pages=parsed.max_pages)
    sys.stdout.write(f"{count} pages: {parsed.export / 'index.html'}\n")
    return ExitCode.DONE


async def _serve(sources: Sources, host: str, port: int) -> None:
    def announce(url: str) -> None:
        sys.stdout.write(f"{len(sources.by_id)} runs and collections: {url}\nStop with Ctrl-C.\n")
        sys.stdout.flush()

    serving = asyncio.ensure_future(server.serve(server.Viewer(sources), host=host, port=port, announce=announce))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serving


VIEW = Command(
    "Show run directories and collections in the browser, live while a run writes.",
    _add_view_arguments,
    _view,
    program="nemo-rl view",
    reported_errors=(OSError,),
)


def open_source(path: Path) -> Source:
    """Open one run or collection and read all of it. Raises ConfigError for another directory."""
    kind = find_kind(path)
    if kind is None:
        problem = "is no run (metrics.jsonl, rollouts/train.jsonl) and no collection (rollouts-rs*.jsonl)"
        raise ConfigError("RUN", str(path), problem)
    return Source(path.resolve().name, path.resolve(), kind, None).complete()


def _add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="RUN", help="runs, or collections; the first is the base"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the comparison there")


def _compare(parsed: argparse.Namespace) -> ExitCode:
    configure_logging()
    opened = [open_source(path) for path in parsed.paths]
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


def _add_check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's directory")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--replay", type=int, metavar="STEP", help="recompute a training step from its stored rollouts")


def _check(parsed: argparse.Namespace) -> ExitCode:
    if parsed.replay is not None:
        from nemo_rl.viewer import replay  # imports torch

        return replay.run_replay(parsed.run, parsed.replay)
    configure_logging()
    source = open_source(parsed.run)
    if source.kind != "run":
        raise ConfigError("RUN", str(parsed.run), "is a collection; `nemo-rl profile` has its statistics")
    findings = check.check(source)
    if parsed.json:
        sys.stdout.write(json.dumps([asdict(finding) for finding in findings], indent=2, ensure_ascii=False) + "\n")
    else:
        for finding in findings:
            sys.stdout.write(f"{finding.severity:<8} {finding.name}: {show(finding.evidence)}\n")
            sys.stdout.writelines(f"{'':9}{text}: {address}\n" for text, address in finding.links)
        sys.stdout.write(f"Look       nemo-rl view {parsed.run}\n" if findings else "no findings\n")
    return ExitCode.FAILED if any(finding.severity == "alarm" for finding in findings) else ExitCode.DONE


CHECK = Command(
    "Look for what is wrong with a run; exit code 1 for an alarm. With --replay: recompute a step and compare.",
    _add_check_arguments,
    _check,
    program="nemo-rl check",
    reported_errors=(OSError,),
)
