"""Heartbeat of a supervised command: a small file that says that the process lives, how far it is, and why it failed.

`nemo-rl run` names the file in NEMO_RL_HEARTBEAT; without that variable nothing is written. Readers compare counters
with what they read before and time them by their own monotonic clock, so no clock is shared.
"""

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_rl.errors import summarize_error

VARIABLE = "NEMO_RL_HEARTBEAT"
PERIOD_S = 0.25


class Heartbeat:
    """The writer: a daemon thread that replaces the file every PERIOD_S while the process runs.

    `beats` grows with every write, `progress` with every call of `record`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._state: dict[str, Any] = {"pid": os.getpid(), "beats": 0, "progress": 0, "step": 0, "phase": "starting"}
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._write()
        self._thread.start()

    def record(self, **changes: Any) -> None:
        """Count progress and note `changes`; cheap enough for every rollout.

        The phase "training" says that everything is loaded: the modules are written beside the file.
        """
        if changes.get("phase") == "training":
            with contextlib.suppress(OSError):
                _modules_file(self._path).write_text(json.dumps(loaded_modules()))
        self._state["progress"] += 1
        self._state.update(changes)

    def end(self, error: BaseException | None = None) -> None:
        """Write the last state, with the error that ends the process, and stop."""
        if error is not None and not isinstance(error, SystemExit):
            self._state["error"] = summarize_error(error)
        self._ended.set()
        self._thread.join(10 * PERIOD_S)
        self._write()

    def _beat(self) -> None:
        while not self._ended.wait(PERIOD_S):
            self._write()

    def _write(self) -> None:
        with self._lock, contextlib.suppress(OSError):  # a full disk must not end the run; the supervisor sees no beat
            self._state["beats"] += 1
            draft = self._path.with_suffix(".tmp")
            draft.write_text(json.dumps(dict(self._state), default=str))
            os.replace(draft, self._path)


_heartbeat: Heartbeat | None = None


def is_supervised() -> bool:
    """Return whether `nemo-rl run` started this process and will restart it."""
    return VARIABLE in os.environ


def record(**changes: Any) -> None:
    """Count progress of this process; does nothing if it is not supervised."""
    if _heartbeat is not None:
        _heartbeat.record(**changes)


@contextlib.contextmanager
def beating() -> Iterator[None]:
    """Write the heartbeat of this process inside the block, and the error that leaves it."""
    global _heartbeat
    if not is_supervised() or _heartbeat is not None:
        yield
        return
    _heartbeat = Heartbeat(Path(os.environ[VARIABLE]))
    _heartbeat.start()
    try:
        yield
    except BaseException as error:
        _heartbeat.end(error)
        raise
    else:
        _heartbeat.end()
    finally:
        _heartbeat = None


def loaded_modules() -> list[str]:
    """Return the installed modules of this process in the order of their import, up to the engine's.

    vLLM is imported under an environment of its own (generation/vllm), so neither it nor what it loads is listed.
    """
    names = []
    for name, module in list(sys.modules.items()):
        if name == "vllm":
            break
        file = getattr(module, "__file__", None) or ""
        if name.startswith("nemo_rl.") or "site-packages" in file:
            names.append(name)
    return names


def _modules_file(path: Path) -> Path:
    return path.with_name("modules.json")


def read_modules(path: Path) -> list[str]:
    """Return the modules that the process with this heartbeat file had imported when its training began."""
    try:
        return json.loads(_modules_file(path).read_text())
    except (OSError, ValueError):
        return []


def read(path: Path) -> Mapping[str, Any]:
    """Return the state in a heartbeat file; empty if there is none yet."""
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}
