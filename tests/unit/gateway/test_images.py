"""Images in requests: an agent that takes screenshots by a tool trains on the same tokens in every dialect."""

import asyncio
import base64
import io
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from PIL import Image

from nemo_rl.config.images import GatewayImagesConfig
from nemo_rl.data import vision
from nemo_rl.data.chat import ChatEncoder, flat_token_ids
from nemo_rl.data.vision import ImageEncoder
from nemo_rl.environments.ecosystem.mcp import McpAgent, McpConfig
from nemo_rl.gateway import images as gateway_images
from nemo_rl.gateway.codec import Codec
from nemo_rl.gateway.completions import CompletionRules
from nemo_rl.gateway.server import GatewayServer, ServerSettings
from nemo_rl.gateway.sessions import Chain
from nemo_rl.types import (
    Completion,
    FailedRequest,
    GenerationRequest,
    ImagePart,
    Message,
    Prompt,
    SamplingParams,
    TextPart,
    placed_images,
)
from tests.fakes.generation import FakeGeneration
from tests.fakes.vision import picture, png, save_vision_model

DEADLINE_S = 120.0
CALL = '<tool_call>\n{"name": "screenshot", "arguments": {"of": 1}}\n</tool_call>'
DONE = "It is closed."
SCREENS = (picture(1), picture(2, 84, 56), picture(1))  # the third is the first again
TASK, RESULT = "close the window", "screen:"
SCHEMA = {"type": "object", "properties": {"of": {"type": "integer"}}}
LIMITS = GatewayImagesConfig(max_count=3, max_bytes=20_000, max_pixels=10_000)

Post = Callable[[str, Mapping[str, Any]], Awaitable[tuple[int, dict[str, Any]]]]


class ActingEngine(FakeGeneration):
    """Takes screenshots until it has seen three pictures."""

    def __init__(self, encoder: ChatEncoder) -> None:
        super().__init__()
        self._encoder = encoder

    async def _answer(self, request: GenerationRequest) -> Completion | FailedRequest:
        text = DONE if len(request.images) >= len(SCREENS) else CALL
        assert self._encoder.tokenizer is not None
        ids = (*self._encoder.tokenizer.encode(text, add_special_tokens=False), self._encoder.stop_token_ids[0])
        return Completion(request.request_id, ids, tuple(-0.1 * i for i in range(len(ids))), "stop")


def base64_of(image: ImagePart) -> str:
    return base64.b64encode(image.file).decode()


def url_of(image: ImagePart) -> str:
    return f"data:image/png;base64,{base64_of(image)}"


def plain(width: int, height: int) -> ImagePart:
    return ImagePart("", png(Image.new("RGB", (width, height))))


class ChatAgent:
    """An agent's history in one dialect: `ask` returns the path and body of the next call, `answer` takes its reply."""

    path = "/chat/completions"

    def __init__(self, image: ImagePart, text: str = TASK) -> None:
        self.turns: list[Any] = [self.user([self.image(image), self.text(text)])]

    def user(self, content: list[Any]) -> Any:
        return {"role": "user", "content": content}

    def text(self, text: str) -> Any:
        return {"type": "text", "text": text}

    def image(self, image: ImagePart) -> Any:
        return {"type": "image_url", "image_url": {"url": url_of(image)}}

    def body(self) -> dict[str, Any]:
        return {
            "messages": self.turns,
            "tools": [{"type": "function", "function": {"name": "screenshot", "parameters": SCHEMA}}],
        }

    def take(self, reply: dict[str, Any]) -> str | None:
        """Append a reply; return the id of its call, if any."""
        message = reply["choices"][0]["message"]
        self.turns.append(message)
        return message["tool_calls"][0]["id"] if message.get("tool_calls") else None

    def show(self, call_id: str, image: ImagePart) -> None:
        """Append a tool's result."""
        content = [self.text(RESULT), self.image(image)]
        self.turns.append({"role": "tool", "tool_call_id": call_id, "content": content})


class ResponsesAgent(ChatAgent):
    path = "/responses"

    def text(self, text: str) -> Any:
        return {"type": "input_text", "text": text}

    def image(self, image: ImagePart) -> Any:
        return {"type": "input_image", "image_url": url_of(image), "detail": "auto"}

    def body(self) -> dict[str, Any]:
        return {"input": self.turns, "tools": [{"type": "function", "name": "screenshot", "parameters": SCHEMA}]}

    def take(self, reply: dict[str, Any]) -> str | None:
        self.turns += reply["output"]
        return next((item["call_id"] for item in reply["output"] if item["type"] == "function_call"), None)

    def show(self, call_id: str, image: ImagePart) -> None:
        output = [self.text(RESULT), self.image(image)]
        self.turns.append({"type": "function_call_output", "call_id": call_id, "output": output})


class MessagesAgent(ChatAgent):
    path = "/messages"

    def image(self, image: ImagePart) -> Any:
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64_of(image)}}

    def body(self) -> dict[str, Any]:
        tools = [{"name": "screenshot", "input_schema": SCHEMA}]
        return {"model": "m", "max_tokens": 256, "messages": self.turns, "tools": tools}

    def take(self, reply: dict[str, Any]) -> str | None:
        self.turns.append({"role": "assistant", "content": reply["content"]})
        return next((block["id"] for block in reply["content"] if block["type"] == "tool_use"), None)

    def show(self, call_id: str, image: ImagePart) -> None:
        content = [self.text(RESULT), self.image(image)]
        self.turns.append(self.user([{"type": "tool_result", "tool_use_id": call_id, "content": content}]))


class GeminiAgent(ChatAgent):
    path = "/models/m:generateContent"

    def user(self, content: list[Any]) -> Any:
        return {"role": "user", "parts": content}

    def text(self, text: str) -> Any:
        return {"text": text}

    def image(self, image: ImagePart) -> Any:
        data = base64.urlsafe_b64encode(image.file).decode().rstrip("=")  # as Google's clients write it
        return {"inlineData": {"mimeType": "image/png", "data": data}}

    def body(self) -> dict[str, Any]:
        declared = [{"name": "screenshot", "parametersJsonSchema": SCHEMA}]
        return {"contents": self.turns, "tools": [{"functionDeclarations": declared}]}

    def take(self, reply: dict[str, Any]) -> str | None:
        content = reply["candidates"][0]["content"]
        self.turns.append(content)
        return next((part["functionCall"]["id"] for part in content["parts"] if "functionCall" in part), None)

    def show(self, call_id: str, image: ImagePart) -> None:
        result = {"id": call_id, "name": "screenshot", "response": {"output": RESULT}, "parts": [self.image(image)]}
        self.turns.append(self.user([{"functionResponse": result}]))


AGENTS = (ChatAgent, ResponsesAgent, MessagesAgent, GeminiAgent)


async def play(agent: ChatAgent, post: Post) -> None:
    """Let an agent take the screenshots that the policy asks for."""
    for screen in (*SCREENS[1:], None):
        status, reply = await post(agent.path, agent.body())
        assert status == 200, reply
        call_id = agent.take(reply)
        if call_id is None or screen is None:
            return
        agent.show(call_id, screen)


def serving(
    images: ImageEncoder | None,
    use: Any,
    *,
    encoder: ChatEncoder | None = None,
    limits: GatewayImagesConfig = LIMITS,
    max_model_len: int = 2048,
) -> Any:
    """Return what `use(server, engine, post)` does with a server; `post` calls it in a session that `use` opens."""
    encoder = encoder or ChatEncoder(images._processor.tokenizer, images=images)  # type: ignore[union-attr]

    async def main() -> Any:
        engine = ActingEngine(encoder)
        sampling = SamplingParams(256, stop_token_ids=encoder.stop_token_ids)
        rules = CompletionRules("m", max_model_len, sampling, seed=7, max_concurrent_calls=8, timeout_s=DEADLINE_S)
        codec = Codec(encoder, tool_parser_name="hermes")
        server = await GatewayServer.start(engine, codec, rules, ServerSettings(images=limits))
        try:
            async with ClientSession() as http:
                return await asyncio.wait_for(use(server, engine, http), DEADLINE_S)
        finally:
            await server.close()

    return asyncio.run(main())


def poster(server: GatewayServer, http: ClientSession, session_id: str | None) -> Post:
    async def post(path: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        base = f"{server.base_url}/v1" if session_id is None else server.session_url(session_id)
        headers = {"Authorization": f"Bearer {server.token}"} if session_id is None else {}
        async with http.post(f"{base}{path}", json=body, headers=headers) as response:
            return response.status, await response.json()

    return post


@pytest.fixture(scope="module", params=["idefics3", "qwen2_5_vl"])
def images(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ImageEncoder:
    path: Path = tmp_path_factory.mktemp(request.param)
    save_vision_model(request.param, path)
    return ImageEncoder.load(str(path))


def test_screenshots_by_a_tool_are_token_exact_in_every_dialect(images: ImageEncoder) -> None:
    async def use(server: GatewayServer, engine: ActingEngine, http: ClientSession) -> dict[str, Sequence[Chain]]:
        chains = {}
        for agent in AGENTS:
            engine.requests.clear()
            session_id = server.open_session(seed=5)
            await play(agent(SCREENS[0]), poster(server, http, session_id))
            chains[agent.path] = server.close_session(session_id).chains()
            (chain,) = chains[agent.path]
            tokens, placed = flat_token_ids(chain.message_log), placed_images(chain.message_log)
            for number, request in enumerate(engine.requests, start=1):
                assert request.token_ids == tokens[: len(request.token_ids)]
                assert request.images == placed[:number]
        return chains

    before = images.num_encoded
    chains = serving(images, use)
    assert images.num_encoded - before == 2
    (chain,) = chains["/chat/completions"]
    assert [image.features.digest for image in placed_images(chain.message_log)] == [s.digest for s in SCREENS]
    for (other,) in chains.values():
        assert other.message_log == chain.message_log

    mark = "<image>" if images.mark == "<image>" else f"<|vision_start|>{images.mark}<|vision_end|>"
    shown = f"assistant:{CALL}<|end|>tool:{RESULT}{mark}<|end|>"
    text = f"user:{mark}{TASK}<|end|>{shown}{shown}assistant:{DONE}<|end|>"
    pictures = [Image.open(io.BytesIO(each.file)).convert("RGB") for each in SCREENS]
    whole = images._processor(text=[text], images=[pictures] if mark == "<image>" else pictures)["input_ids"][0]
    assert flat_token_ids(chain.message_log) == tuple(whole)


def test_screenshots_of_an_mcp_server_are_seen(images: ImageEncoder) -> None:
    pytest.importorskip("mcp", reason="the extra mcp is not installed")

    async def use(server: GatewayServer, engine: ActingEngine, http: ClientSession) -> None:
        section = McpConfig(command=[sys.executable, "-m", "tests.fakes.mcp_server"], images=True, max_turns=3)
        prompt = Prompt("p", "screens", (Message("user", (SCREENS[0], TextPart(TASK))),))
        for max_images, shown, answer in ((16, 3, DONE), (1, 2, "")):
            own = section.model_copy(update={"max_images": max_images})
            session_id = server.open_session(seed=5)
            result = await McpAgent("screens", own).run(prompt, server.session_url(session_id), session_id)
            assert result.answer == answer
            (chain,) = server.close_session(session_id).chains()
            assert len(placed_images(chain.message_log)) == shown  # what is no picture is left out
            results = [each.message for each in chain.message_log if each.message.role == "tool"]
            assert {each.content for each in results} == {f"{RESULT}\n[image]\n[image]"}

    serving(images, use)


def test_another_picture_is_another_conversation(images: ImageEncoder) -> None:
    """Both have the same tokens; without a session the echoed tokens alone would not tell them apart."""

    async def use(server: GatewayServer, engine: ActingEngine, http: ClientSession) -> None:
        session_id = server.open_session(seed=5)
        for named in (session_id, None):
            post = poster(server, http, named)
            agents = [ChatAgent(picture(seed)) for seed in (3, 4)]
            for agent in agents:
                status, reply = await post(agent.path, agent.body())
                assert status == 200
                agent.show(agent.take(reply) or "", SCREENS[1])
            engine.requests.clear()
            for agent in agents:
                assert (await post(agent.path, agent.body()))[0] == 200
            first = [request.images[0].features.digest for request in engine.requests]
            assert first == [picture(seed).digest for seed in (3, 4)]
            assert len({request.token_ids for request in engine.requests}) == 1
        assert len(server.close_session(session_id).chains()) == 2

    serving(images, use)


WRONG: list[tuple[Any, str]] = [
    ("https://example.com/a.png", "nothing is fetched; allowed: data:image/png;base64"),
    ("file:///etc/passwd", "nothing is fetched"),
    ("/etc/passwd", "nothing is fetched"),
    ("data:image/svg+xml;base64,PHN2Zy8+", "is no image that can be read"),
    ("data:image/png;base64,!!", "base64"),
    (url_of(picture(0, 200, 200))[:-40], "bytes"),
    (f"data:image/png;base64,{'A' * 40_000}", "max_bytes = 20000"),
    (url_of(plain(2000, 6)), "has 2000 x 6 pixels"),
]


@pytest.mark.parametrize(("url", "said"), WRONG)
def test_a_wrong_picture_is_a_400_with_its_place(url: str, said: str, images: ImageEncoder) -> None:
    async def use(server: GatewayServer, engine: ActingEngine, http: ClientSession) -> None:
        session_id = server.open_session(seed=5)
        body = ChatAgent(SCREENS[0])
        body.turns[0]["content"][0]["image_url"]["url"] = url
        status, reply = await poster(server, http, session_id)(body.path, body.body())
        assert status == 400
        assert said in reply["error"]["message"]
        assert reply["error"]["param"] == "messages.0.content.0.image_url.url"
        assert len(reply["error"]["message"]) < 400

    serving(images, use)


@pytest.mark.parametrize("agent", AGENTS)
def test_pictures_are_counted_and_refused_in_other_roles_and_to_policies_that_read_text(
    agent: type[ChatAgent], images: ImageEncoder
) -> None:
    async def use(server: GatewayServer, engine: ActingEngine, http: ClientSession) -> list[str]:
        post, said = poster(server, http, server.open_session(seed=5)), []
        many = agent(SCREENS[0])
        many.turns[0] = many.user([many.image(SCREENS[0])] * 4)
        by_assistant = agent(SCREENS[0])
        by_assistant.turns.insert(
            0, {**by_assistant.turns[0], "role": "model" if agent is GeminiAgent else "assistant"}
        )
        for asked in (many, by_assistant):
            status, reply = await post(asked.path, asked.body())
            assert status == 400
            said.append(reply["error"]["message"])
        return said

    counted, wrong_role = serving(images, use)
    assert "gateway.images.max_count is 3" in counted
    assert "not supported" in wrong_role
    text_only, _ = serving(None, use, encoder=ChatEncoder(images._processor.tokenizer))
    assert "not supported" in text_only


TOTAL_LIMITS: list[tuple[dict[str, int], str]] = [
    ({"max_total_bytes": 2 * len(SCREENS[0].file) - 1}, "bytes of images up to here; gateway.images.max_total_bytes"),
    (
        {"max_total_pixels": 2 * 56 * 56 - 1},
        "6272 pixels of images up to here; gateway.images.max_total_pixels is 6271",
    ),
]


@pytest.mark.parametrize(("limits", "said"), TOTAL_LIMITS)
def test_a_request_has_a_budget_of_bytes_and_pixels(limits: dict[str, int], said: str, images: ImageEncoder) -> None:
    """Repeated and known images count again: their place in the request is what costs."""

    async def use(server: GatewayServer, engine: ActingEngine, http: ClientSession) -> None:
        post = poster(server, http, server.open_session(seed=5))
        assert (await post(ChatAgent.path, ChatAgent(SCREENS[0]).body()))[0] == 200
        twice = ChatAgent(SCREENS[0])
        twice.turns[0]["content"].append(twice.image(SCREENS[0]))
        status, reply = await post(twice.path, twice.body())
        assert status == 400
        assert said in reply["error"]["message"]
        assert reply["error"]["param"] == "messages.0.content.2.image_url.url"

    serving(images, use, limits=GatewayImagesConfig.model_validate(limits))


def test_images_beyond_the_context_are_not_encoded(images: ImageEncoder) -> None:
    async def use(server: GatewayServer, engine: ActingEngine, http: ClientSession) -> None:
        agent, before = ChatAgent(SCREENS[0]), images.num_encoded
        agent.turns[0]["content"] += [agent.image(picture(seed)) for seed in (11, 12)]
        status, reply = await poster(server, http, server.open_session(seed=5))(agent.path, agent.body())
        assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
        assert images.num_encoded - before == 1

    tokens = images.encode(SCREENS[0]).features.num_tokens
    serving(images, use, max_model_len=tokens + 1)


def test_other_sessions_are_answered_while_a_request_is_read(
    images: ImageEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading the slow request ends once the other session's calls, with text and with a picture, are answered."""
    is_reading, may_end, slow = threading.Event(), threading.Event(), picture(21)
    decode = vision.decode

    def decode_slowly(file: bytes, *arguments: Any) -> Image.Image:
        if file == slow.file:
            is_reading.set()
            assert may_end.wait(DEADLINE_S)
        return decode(file, *arguments)

    async def use(server: GatewayServer, engine: ActingEngine, http: ClientSession) -> None:
        first, second = (poster(server, http, server.open_session(seed=seed)) for seed in (1, 2))
        reading = asyncio.ensure_future(first(ChatAgent.path, ChatAgent(slow).body()))
        await asyncio.to_thread(is_reading.wait, DEADLINE_S)
        text = ChatAgent(SCREENS[0])
        text.turns = [text.user([text.text(TASK)])]
        for agent in (text, ChatAgent(SCREENS[0])):
            assert (await second(agent.path, agent.body()))[0] == 200
        assert not reading.done()
        may_end.set()
        assert (await reading)[0] == 200

    images.encode(SCREENS[0])
    monkeypatch.setattr(vision, "decode", decode_slowly)
    serving(images, use)


def test_kept_images_are_bounded_and_checked_once(images: ImageEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = picture(1), picture(2)
    store = gateway_images.ImageStore(LIMITS, images)

    async def read(image: ImagePart) -> ImagePart:
        request = gateway_images.RequestImages(store)
        found = request.read(url_of(image), "here")
        assert await request.check(2048) == images.encode(image).features.num_tokens
        return found

    async def main() -> None:
        assert await read(one) is await read(one)
        monkeypatch.setattr(gateway_images, "KEPT_BYTES", len(two.file) + 10)
        await read(two)

    asyncio.run(main())
    store.close()
    assert list(store._known) == [two.digest]
    assert store._kept_bytes == len(two.file)
