"""The process behind a ProcessPool: it calls one function on each request, in the sandbox if the pool asks for it.

A request is a length of eight bytes and a pickle, which the trainer wrote: a random id, and the arguments of each call,
pickled. A reply is one line of JSON, `{"id": ..., "results": [...]}`, with `{"result": ...}` or `{"error": "..."}` for
each call. The first reply, with an empty id, says that the process is ready and which layers of the sandbox hold.
"""

import contextlib
import importlib
import json
import os
import pickle
import resource
import signal
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import nemo_rl
from nemo_rl.environments.sandbox_launcher import drop_privileges

START_TIMEOUT_S = 300.0  # time for imports and the factory, beside other work
ORPHAN_GRACE_S = 10.0  # after the deadline, a process that was not killed is ended by its own alarm


def serve(descriptor: int, settings: Mapping[str, Any]) -> None:
    """Answer requests until the trainer closes its end; `settings` are those that ProcessPool writes."""
    with contextlib.suppress(BrokenPipeError), open(descriptor, "rb") as requests:
        signal.setitimer(signal.ITIMER_REAL, START_TIMEOUT_S + ORPHAN_GRACE_S)
        try:
            function, held = _start(settings, _read(requests))
        except BaseException as error:  # an import that fails, a factory that ends the program  # noqa: BLE001
            _write(descriptor, "", [{"error": _describe(error)}])
            return
        _write(descriptor, "", [{"result": held}])
        while (request := _read(requests)) is not None:
            request_id, batch = request
            signal.setitimer(signal.ITIMER_REAL, settings["timeout_s"] + ORPHAN_GRACE_S)
            results = [_call(function, args, settings["cpu_s"] or 0) for args in batch]
            signal.setitimer(signal.ITIMER_REAL, 0)
            _write(descriptor, request_id, results)


def _start(
    settings: Mapping[str, Any], factory_args: tuple[Any, ...] | None
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the function, imported or made by its factory, and the layers of the sandbox around this process."""
    memory = settings["memory_bytes"] or resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    module_name, _, name = settings["function"].partition(":")
    module = importlib.import_module(module_name)
    function = getattr(module, name)
    if factory_args is not None:
        function = function(*factory_args)
    sandbox = settings["sandbox"]
    if sandbox is None:
        return function, {}
    threads = os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else [""]
    if len(threads) > 1:  # they would keep the trainer's rights
        raise RuntimeError(f"{len(threads)} threads run after the imports; the sandbox can hold one alone")
    package = Path(nemo_rl.__file__).parent
    readable = [str(package), *([_root(module.__name__, file)] if (file := module.__file__) else [])]
    return function, drop_privileges({**sandbox, "readable": readable}, is_served=True)


def _root(module: str, file: str) -> str:
    """Return the directory of a module's topmost package, or the file of a module without one."""
    depth = module.count(".") - (Path(file).name != "__init__.py")
    return str(Path(file).parents[depth]) if depth >= 0 else file


def _call(function: Callable[..., Any], args: bytes, cpu_s: float) -> dict[str, Any]:
    """Return the function's result; SIGPROF ends the process if it computes for longer than `cpu_s`."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        return {"result": function(*pickle.loads(args))}
    except BaseException as error:  # SystemExit too: only its own call fails  # noqa: BLE001
        return {"error": _describe(error)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _read(requests: Any) -> Any:
    """Return the next request; None once the trainer has closed its end."""
    header = requests.read(8)
    return pickle.loads(requests.read(*struct.unpack("=Q", header))) if header else None


def _write(descriptor: int, request_id: str, results: Sequence[dict[str, Any]]) -> None:
    try:
        text = json.dumps({"id": request_id, "results": results})
    except (TypeError, ValueError, RecursionError):
        text = json.dumps({"id": request_id, "results": list(map(_writable, results))})
    data = memoryview(text.encode() + b"\n")
    while data:
        data = data[os.write(descriptor, data) :]


def _writable(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result, or the error that it cannot be written."""
    try:
        json.dumps(result)
    except (TypeError, ValueError, RecursionError) as error:
        return {"error": f"the result cannot be written as JSON: {_describe(error)}"}
    return result
