"""`nemo-rl replicas`: the number of engine replicas of a run, read and changed while it trains.

The command and the run meet in two files of the run directory, so that nothing listens: `replicas.json`, which the run
writes every second, and `replicas.wanted`, a number that the command writes and the run takes away.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from nemo_rl.command_line import Command, ExitCode, path_argument
from nemo_rl.distributed.machine import write_private
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.generation.router import ReplicaState, ReplicatedGeneration
from nemo_rl.interfaces import Generation

logger = logging.getLogger(__name__)

STATE_FILE, REQUEST_FILE = "replicas.json", "replicas.wanted"
PERIOD_S = 1.0
SILENT_S = 60.0  # time without a new state after which the run is taken to have ended
WAIT_S = 600.0


@dataclass(frozen=True, slots=True)
class ReportedState:
    """The content of `replicas.json`."""

    replicas: ReplicaState
    refusal: str  # why the last requested number is not possible; "" if it can
    beats: int  # how often it was written


_REPORTED_STATE = TypeAdapter(ReportedState)


@contextlib.asynccontextmanager
async def follow_requests(generation: Generation, run_dir: Path) -> AsyncIterator[None]:
    """Do what `nemo-rl replicas` asks for inside the block; nothing for an engine without replicas."""
    if not isinstance(generation, ReplicatedGeneration):
        yield
        return
    task = asyncio.create_task(_follow(generation, run_dir))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        for name in (STATE_FILE, REQUEST_FILE):
            (run_dir / name).unlink(missing_ok=True)


async def _follow(generation: ReplicatedGeneration, run_dir: Path) -> None:
    refusal, beats = "", 0
    while True:
        try:
            if (text := _take_request(run_dir / REQUEST_FILE)) is not None:
                refusal = _resize(generation, text)
            beats += 1
            _replace(run_dir / STATE_FILE, json.dumps(asdict(ReportedState(generation.state, refusal, beats))))
        except Exception as error:  # as a full disk: must not end the run  # noqa: BLE001
            logger.debug("the state of the replicas cannot be read or written: %s", error)
        await asyncio.sleep(PERIOD_S)


def _take_request(path: Path) -> str | None:
    taken = path.with_name(f"{path.name}.taken")
    try:
        path.rename(taken)
    except FileNotFoundError:
        return None
    text = taken.read_text(errors="replace")
    taken.unlink()
    return text


def _resize(generation: ReplicatedGeneration, text: str) -> str:
    """Change the number of replicas; return why it cannot be."""
    try:
        count = int(text)
        generation.resize(count)
    except ValueError as error:
        logger.warning("nemo-rl replicas: %s", error)
        return str(error)
    logger.info("nemo-rl replicas: %d engine replicas are wanted", count)
    return ""


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    write_private(draft, text)
    os.replace(draft, path)


def _read_state(run_dir: Path) -> ReportedState:
    """Return the state that the run wrote last. Raises DataError if there is none."""
    try:
        return _REPORTED_STATE.validate_json((run_dir / STATE_FILE).read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        if not run_dir.is_dir():
            raise DataError(f"{run_dir}: no such run directory") from error
        problem = "the run has ended, has not started its engines yet, or has one in its own process"
        cure = "to change their number, start it with policy.generation.num_replicas of 2 or more, or in_actor: true"
        raise DataError(f"{run_dir / STATE_FILE}: not there: {problem}; {cure}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = f"{'.'.join(map(str, first['loc']))}: " if first["loc"] else ""
        raise DataError(f"{run_dir / STATE_FILE}: is no state of replicas: {where}{first['msg']}") from error


def _run(parsed: argparse.Namespace) -> ExitCode:
    if parsed.count is not None and parsed.count < 1:
        raise ConfigError("COUNT", parsed.count, "must be 1 or more")
    if parsed.wait is not None and not parsed.wait > 0:
        raise ConfigError("--wait", parsed.wait, "must be > 0, in seconds")
    before = _read_state(parsed.run_dir)
    if parsed.count is None:
        _print(_wait(parsed.run_dir, before, SILENT_S))
        return ExitCode.DONE
    _replace(parsed.run_dir / REQUEST_FILE, str(parsed.count))
    taken = _wait(parsed.run_dir, before, SILENT_S, is_reached=lambda _: not (parsed.run_dir / REQUEST_FILE).exists())
    state = _wait(parsed.run_dir, taken, SILENT_S)  # written after the request was taken
    if state.refusal:
        raise ConfigError("COUNT", parsed.count, state.refusal)
    if parsed.wait:
        state = _wait(parsed.run_dir, state, parsed.wait, is_reached=_is_settled)
    _print(state)
    if failed := state.replicas.failed:
        raise DataError(f"{parsed.run_dir}: {', '.join(failed)} did not start: {state.replicas.problem}")
    return ExitCode.DONE


def _is_settled(state: ReportedState) -> bool:
    replicas = state.replicas
    return bool(replicas.failed) or (len(replicas.serving) == replicas.wanted and not replicas.leaving)


def _wait(
    run_dir: Path,
    seen: ReportedState,
    limit_s: float,
    *,
    is_reached: Callable[[ReportedState], bool] = lambda state: True,
) -> ReportedState:
    """Return the first newer state for which `is_reached` holds. Raises DataError at the limit, or when the run is
    silent."""
    until, spoke, beats = time.monotonic() + limit_s, time.monotonic(), seen.beats
    while True:
        state = _read_state(run_dir)
        if state.beats != beats:
            spoke, beats = time.monotonic(), state.beats
        if beats != seen.beats and is_reached(state):
            return state
        if time.monotonic() - spoke > SILENT_S:
            raise DataError(f"{run_dir}: the run has written no state for {SILENT_S:g} s; has it been killed?")
        if time.monotonic() > until:
            _print(state)
            raise DataError(f"{run_dir}: not reached within {limit_s:g} s; the run continues with the change")
        time.sleep(PERIOD_S / 4)


def _print(state: ReportedState) -> None:
    replicas = state.replicas
    sys.stdout.write(f"wanted: {replicas.wanted}\n")
    for group in fields(replicas):
        names = getattr(replicas, group.name)
        if isinstance(names, tuple) and (names or group.name != "failed"):
            listed = f" ({', '.join(names)})" if names else ""
            sys.stdout.write(f"{group.name}: {len(names)}{listed}\n")
    if replicas.problem:
        sys.stdout.write(f"problem: {replicas.problem}\n")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=path_argument, metavar="RUN", help="directory of a run that trains now")
    parser.add_argument("count", type=int, nargs="?", metavar="COUNT", help="replicas to have; without it: show them")
    parser.add_argument(
        "--wait", type=float, nargs="?", const=WAIT_S, metavar="S", help=f"until it has them; at most S ({WAIT_S:g}) s"
    )


REPLICAS = Command(
    """Show the engine replicas of a training run, or change their number while it trains.

New replicas start beside the others and serve from the next refit on. Replicas that leave get no more requests, answer
those that they have, and end at the next refit: no request is lost. A start that fails is tried again twice, after 10
and 60 s. On GPUs there are at most as many as the run was
started with (policy.generation.num_replicas), since their devices were set aside then.""",
    _add_arguments,
    _run,
    program="nemo-rl replicas",
)
