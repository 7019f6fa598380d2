"""Imported by Python at the start of each process of a traced stack: requests between servers carry their trace.

FastAPI makes the spans of servers and sends them, as the variables of `stack.py` tell it; here is what it leaves out:
the service's name, and the header by which the spans of a called server belong to those of its caller.
"""

# Runs in Gym's Python, and is checked without Gym installed.
# pyright: reportMissingImports=false

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

CLIENT = "aiohttp.client"
SERVER_VARIABLE = "NEMO_GYM_CONFIG_PATH"  # Gym's: the name of the server that a process is


class _ClientFinder(MetaPathFinder):
    """Changes aiohttp's client when a process imports it; most processes of a stack never do."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != CLIENT:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(CLIENT)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            send_context(module.ClientSession)

        spec.loader.exec_module = execute_and_change
        return spec


def send_context(session: type) -> None:
    """Have each request of aiohttp's sessions carry the header of the current span."""
    make = session.__init__

    def make_traced(self: Any, *args: Any, trace_configs: Sequence[Any] | None = None, **kwargs: Any) -> None:
        make(self, *args, trace_configs=[*(trace_configs or ()), _trace_config()], **kwargs)

    session.__init__ = make_traced


def _trace_config() -> Any:
    from aiohttp import TraceConfig
    from opentelemetry.propagate import inject

    async def add_header(session: Any, context: Any, request: Any) -> None:
        inject(request.headers)

    config = TraceConfig()
    config.on_request_start.append(add_header)
    return config


def _run_next() -> None:
    """Run the `sitecustomize` whose place this one has taken, if the environment has one."""
    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.abspath(path) != here])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if SERVER_VARIABLE in os.environ:
    os.environ["OTEL_SERVICE_NAME"] = f"nemo-gym/{os.environ[SERVER_VARIABLE]}"
if importlib.util.find_spec("opentelemetry") is not None:  # not in every environment of a stack
    sys.meta_path.insert(0, _ClientFinder())
_run_next()
