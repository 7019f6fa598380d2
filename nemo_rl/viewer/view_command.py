"""`nemo-rl view`."""

import argparse
import asyncio
import contextlib
import signal
import sys
from pathlib import Path

from nemo_rl.command_line import Command, ExitCode, path_argument
from nemo_rl.errors import ConfigError
from nemo_rl.observability.console import configure_logging
from nemo_rl.viewer import export, web_app
from nemo_rl.viewer.viewer_sources import ViewerSources


def _add_view_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="runs, collections, or directories of them")
    parser.add_argument("--host", default="127.0.0.1", help="a loopback address (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument(
        "--export", type=path_argument, metavar="DIR", help="write the pages there instead, to open from the disk"
    )
    parser.add_argument("--max-pages", type=int, default=export.MAX_PAGES, help="of an export (default: %(default)s)")
    parser.add_argument("--group", metavar="ID", help="export one group of a run as one file, DIR/group.html")
    parser.add_argument("--step", type=int, help="the training step of --group")


def _view(parsed: argparse.Namespace) -> ExitCode:
    configure_logging()
    if parsed.group and not parsed.export:
        raise ConfigError("--group", parsed.group, "needs --export DIR to write to")
    if parsed.step is not None and not parsed.group:
        raise ConfigError("--step", parsed.step, "needs --group ID, whose step it is")
    if parsed.max_pages < 1:
        raise ConfigError("--max-pages", parsed.max_pages, "must be at least 1")
    sources = ViewerSources.open(parsed.paths or [Path("runs")])
    if parsed.export:
        return _export(sources, parsed)
    with contextlib.suppress(KeyboardInterrupt):  # before the server listens
        asyncio.run(_serve(sources, parsed.host, parsed.port))
    sys.stderr.write("stopped\n")
    return ExitCode.DONE


def _export(sources: ViewerSources, parsed: argparse.Namespace) -> ExitCode:
    for source in sources.by_id.values():
        source.complete()
    if parsed.group:
        if len(sources.by_id) != 1:
            raise ConfigError("PATH", ", ".join(sources.by_id), "name the one run that --group is of")
        path = parsed.export / "group.html"
        export.export_group(sources, next(iter(sources.by_id)), parsed.group, parsed.step, path)
        sys.stdout.write(f"{path}\n")
        return ExitCode.DONE
    count = export.export_site(sources, parsed.export, max_pages=parsed.max_pages)
    sys.stdout.write(f"{count} pages: {parsed.export / 'index.html'}\n")
    for source in sources.by_id.values():
        sys.stdout.writelines(f"{source.id}: {note}\n" for note in source.notes)
    return ExitCode.DONE


async def _serve(sources: ViewerSources, host: str, port: int) -> None:
    def announce(url: str) -> None:
        sys.stdout.write(f"{len(sources.by_id)} runs and collections: {url}\nStop with Ctrl-C.\n")
        sys.stdout.flush()

    serving = asyncio.ensure_future(web_app.serve(web_app.Viewer(sources), host=host, port=port, announce=announce))
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
