"""`nemo-rl check`."""

import argparse
import json
import sys
from dataclasses import asdict

from nemo_rl.command_line import Command, ExitCode, path_argument
from nemo_rl.errors import ConfigError
from nemo_rl.observability.console import configure_logging
from nemo_rl.viewer import check
from nemo_rl.viewer.conversation import show
from nemo_rl.viewer.viewer_sources import ViewerSource


def _add_check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=path_argument, metavar="RUN", help="a run's directory")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--replay", type=int, metavar="STEP", help="recompute a training step from its stored rollouts")


def _check(parsed: argparse.Namespace) -> ExitCode:
    if parsed.replay is not None:
        from nemo_rl.viewer import replay  # imports torch

        return replay.run_replay(parsed.run, parsed.replay)
    configure_logging()
    source = ViewerSource.open(parsed.run)
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
    "Find problems of a run; exit code 1 for an alarm. With --replay: recompute a step and compare.",
    _add_check_arguments,
    _check,
    program="nemo-rl check",
    reported_errors=(OSError,),
)
