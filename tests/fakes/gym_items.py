"""Between the items of OpenAI's Responses and chat messages, as NeMo Gym converts them."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from nemo_rl.environments.nemo_gym.reply import TOKEN_FIELDS

Row: TypeAlias = Mapping[str, Any]
Body: TypeAlias = dict[str, Any]


def messages(items: Sequence[Body]) -> list[Body]:
    """Responses items as chat messages: what the model said in one call is one message, with the tokens of its call."""
    found: list[Body] = []
    said: Body | None = None
    for item in items:
        kind = item.get("type", "message")
        is_said = kind in ("function_call", "reasoning") or (kind == "message" and item["role"] == "assistant")
        if not is_said:
            said = None
            if kind == "function_call_output":
                found.append({"role": "tool", "content": item["output"], "tool_call_id": item["call_id"]})
            else:
                found.append({"role": item["role"], "content": chat_content(item["content"])})
            continue
        if said is None:
            said = {"role": "assistant", "content": None, "tool_calls": []}
            found.append(said)
        if kind == "function_call":
            call = {"name": item["name"], "arguments": item["arguments"]}
            said["tool_calls"].append({"id": item["call_id"], "type": "function", "function": call})
        elif kind == "message":
            said["content"] = text_of(item) or None
        said |= {name: item[name] for name in TOKEN_FIELDS if name in item}
    # Gym leaves out an assistant's message that says nothing, and its tokens with it.
    return [m for m in found if m["role"] != "assistant" or m["content"] or m["tool_calls"]]


def chat_content(content: Any) -> Any:
    """Return the content of a Responses message as Gym's converter writes it for chat completions."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "image_url", "image_url": {"url": part["image_url"], "detail": part.get("detail", "auto")}}
        if part["type"] == "input_image"
        else {"type": "text", "text": part["text"]}
        for part in content
    ]


def output_items(message: Body) -> list[Body]:
    """Return a chat message as Responses items; the last one has the tokens of the call."""
    calls = message.get("tool_calls") or []
    items = [message_item(message.get("content") or "", {})] if message.get("content") or not calls else []
    for call in calls:
        function = call["function"]
        items.append({"type": "function_call", "id": call["id"], "call_id": call["id"], **function})
    items[-1] |= {name: message[name] for name in TOKEN_FIELDS}
    return items


def message_item(text: str, tokens: Body) -> Body:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": content, **tokens}


def made_up_tokens(items: Sequence[Body]) -> Body:
    """Return a call's tokens without a policy: each prompt begins with the previous call."""
    before = next((item for item in reversed(items) if TOKEN_FIELDS[0] in item), None)
    prompt = [*before["prompt_token_ids"], *before["generation_token_ids"], 9] if before else [1, 2, 3]
    return dict(zip(TOKEN_FIELDS, (prompt, [4, 5], [-0.25, -0.5]), strict=True))


def chat_tool(tool: Row) -> Body:
    function = {key: value for key, value in tool.items() if key not in ("type", "strict")}
    return {"type": "function", "function": function}


def text_of(item: Row) -> str:
    content = item["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def last_text(output: Sequence[Body]) -> str:
    return next((text_of(i) for i in reversed(output) if i["type"] == "message" and i["role"] == "assistant"), "")
