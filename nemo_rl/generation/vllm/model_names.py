"""Middleware that `nemo-rl serve` adds to vLLM's server by `--middleware`. Imports no vLLM."""

import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, TypeAlias

Message: TypeAlias = MutableMapping[str, Any]  # an ASGI message
Send: TypeAlias = Callable[[Message], Awaitable[None]]

NOT_FOUND = 404


class ModelNames:
    """Answers a request for an unknown model with the names that exist; vLLM 0.32 names the base model at most."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Send) -> None:
        held: list[Message] = []  # messages of an answer 404, until its body is known

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == NOT_FOUND:
                held.append(message)
            elif not held:
                await send(message)
            else:
                held.append(message)
                if not message.get("more_body"):
                    for each in name_models(held, served_models(scope["app"].state)):
                        await send(each)

        await self._app(scope, receive, send_named if scope["type"] == "http" else send)


def served_models(state: Any) -> list[str]:
    """Return the names of the base model and of the adapters that vLLM's server has loaded."""
    models = state.openai_serving_models
    return [*(model.name for model in models.base_model_paths), *models.lora_requests]


def name_models(messages: list[Message], names: Iterable[str]) -> list[Message]:
    """Return an answer 404 with the names in its error, if that is about the field `model`; else as it is."""
    start, *parts = messages
    body = b"".join(part.get("body", b"") for part in parts)
    try:
        answer = json.loads(body)
        error = answer["error"]
        said = str(error["message"]).partition(" does not exist")
    except (ValueError, KeyError, TypeError):
        return messages
    if not (said[0].startswith("The model `") and said[1]):
        return messages
    error["message"] = f"{said[0]}{said[1]}; known: {', '.join(names)}"
    body = json.dumps(answer).encode()
    headers = [(key, value) for key, value in start["headers"] if key.lower() != b"content-length"]
    length = (b"content-length", str(len(body)).encode())
    return [{**start, "headers": [*headers, length]}, {"type": "http.response.body", "body": body}]
