"""An OpenTelemetry collector for tests: OTLP over HTTP."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@contextmanager
def collector(status: int = 200) -> Iterator[tuple[str, list[Any]]]:
    """Yield the address of a collector, and the requests that it receives."""
    received: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Write nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def services_and_spans(received: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yield each span that a collector received, with the name of its service."""
    for request in received:
        for resource in request.resource_spans:
            service = attributes_of(resource.resource)["service.name"]
            yield from ((service, span) for scope in resource.scope_spans for span in scope.spans)


def attributes_of(described: Any) -> dict[str, Any]:
    """Return the attributes of a span or a resource; those of arrays as lists."""
    return {each.key: _value(each.value) for each in described.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [_value(each) for each in found.values] if kind == "array_value" else found
