"""One agent framework, or official client, in a session of two questions with tools; frameworks.py runs it.

python framework_clients.py NAME    with the session's URL in OPENAI_BASE_URL; the last line is the answers as JSON

The frameworks are used as their manuals show them: nothing here knows the gateway but its address. With CLIENT_FORCES=1
each demands a call of a tool in its first request of a question (`tool_choice`), for models that write none themselves.
"""

# pyright: reportMissingImports=false

import asyncio
import json
import os
import sys
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

SYSTEM = os.environ.get("CLIENT_SYSTEM", "You are a calculator. Use the tools.")
QUESTIONS = ("What is (3 + 4) * 5?", "Double it, and what is 1 + 2?")
MODEL = "policy"
MAX_TURNS = 10  # of a loop that is written here
FORCES = os.environ.get("CLIENT_FORCES") == "1"
MAX_FORCED_STEPS = 2  # of a framework that demands a call in every request
BASE_URL = os.environ.get("OPENAI_BASE_URL", "")
KEY = os.environ.get("OPENAI_API_KEY", "unused")

Answers = list[str]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a * b


TOOLS: Mapping[str, Callable[..., int]] = {"add": add, "multiply": multiply}


async def openai_agents(*, api: str, stream: bool) -> Answers:
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    make = OpenAIResponsesModel if api == "responses" else OpenAIChatCompletionsModel
    model = make(model=MODEL, openai_client=AsyncOpenAI(base_url=BASE_URL, api_key=KEY))
    settings = ModelSettings(tool_choice="required" if FORCES else None)  # reset by it after a call
    tools = [function_tool(f) for f in TOOLS.values()]
    agent = Agent(name="calculator", instructions=SYSTEM, model=model, tools=tools, model_settings=settings)
    answers, history = [], []
    for question in QUESTIONS:
        asked = [*history, {"role": "user", "content": question}]
        if stream:
            result = Runner.run_streamed(agent, asked)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, asked)
        history = result.to_input_list()
        answers.append(str(result.final_output))
    return answers


async def langgraph(*, api: str, stream: bool) -> Answers:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    model = ChatOpenAI(
        model=MODEL, base_url=BASE_URL, api_key=KEY, use_responses_api=api == "responses", streaming=stream
    )
    tools = [tool(f) for f in TOOLS.values()]

    def choose(state: Any, runtime: Any) -> Any:
        is_first = state["messages"][-1].type == "human"
        return model.bind_tools(tools, tool_choice="required" if is_first else None)

    agent = create_react_agent(choose if FORCES else model, tools, prompt=SYSTEM)
    state: dict[str, Any] = {"messages": []}
    answers = []
    for question in QUESTIONS:
        state = await agent.ainvoke({"messages": [*state["messages"], ("user", question)]})
        answers.append(str(state["messages"][-1].text))
    return answers


async def smolagents(*, api: str, stream: bool) -> Answers:
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    model = OpenAIModel(model_id=MODEL, api_base=BASE_URL, api_key=KEY)
    agent = ToolCallingAgent(
        tools=[tool(f) for f in TOOLS.values()],
        model=model,  # which demands a call in each request
        instructions=SYSTEM,
        stream_outputs=stream,
        max_steps=MAX_FORCED_STEPS if FORCES else MAX_TURNS,
    )
    agent.logger.level = -1
    return [str(await asyncio.to_thread(agent.run, question, reset=i == 0)) for i, question in enumerate(QUESTIONS)]


async def pydantic_ai(*, api: str, stream: bool) -> Answers:
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    model: Any
    if api == "messages":
        model = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=BASE_URL, api_key=KEY))
    else:
        make = OpenAIResponsesModel if api == "responses" else OpenAIChatModel
        model = make(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key=KEY))

    async def read(context: Any, events: Any) -> None:
        async for _ in events:
            pass

    def choose(context: Any) -> Any:
        return {"tool_choice": "required"} if context.run_step <= 1 else {}

    settings: Any = choose if FORCES else None
    agent = Agent(model, system_prompt=SYSTEM, tools=list(TOOLS.values()), model_settings=settings)
    answers: Answers = []
    history: Any = None
    for question in QUESTIONS:
        result = await agent.run(question, message_history=history, event_stream_handler=read if stream else None)
        answers.append(str(result.output))
        history = result.all_messages()
    return answers


NUMBER = {"type": "integer"}
PARAMETERS = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
FUNCTIONS = [{"name": name, "description": f"{name} numbers", "parameters": PARAMETERS} for name in TOOLS]


def call_tool(name: str, arguments: str) -> str:
    return str(TOOLS[name](**json.loads(arguments)))


async def litellm(*, api: str, stream: bool) -> Answers:
    """Run the loop of tools here: LiteLLM is a client, not an agent."""
    import litellm as client

    client.suppress_debug_info = True
    if api == "responses":
        return await litellm_responses(stream=stream)
    prefix, base = ("openai", BASE_URL) if api == "chat" else ("anthropic", BASE_URL.removesuffix("/v1"))
    target = {"model": f"{prefix}/{MODEL}", "api_base": base, "api_key": KEY, "max_tokens": 512}
    tools = [{"type": "function", "function": function} for function in FUNCTIONS]
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    answers = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        for turn in range(MAX_TURNS):
            forced = {"tool_choice": {"type": "function", "function": {"name": "add"}}} if FORCES and not turn else {}
            done: Any = await client.acompletion(messages=messages, tools=tools, stream=stream, **forced, **target)
            if stream:
                done = client.stream_chunk_builder([chunk async for chunk in done], messages=messages)
            said = done.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            if not said.tool_calls:
                answers.append(said.content)
                break
            for call in said.tool_calls:
                result = call_tool(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return answers


async def litellm_responses(*, stream: bool) -> Answers:
    import litellm as client

    target = {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": KEY, "instructions": SYSTEM}
    tools = [{"type": "function", **function} for function in FUNCTIONS]
    previous, answers = None, []
    for question in QUESTIONS:
        items: list[Any] = [{"role": "user", "content": question}]
        for turn in range(MAX_TURNS):
            forced = {"tool_choice": {"type": "function", "name": "add"}} if FORCES and not turn else {}
            done: Any = await client.aresponses(
                input=items, tools=tools, stream=stream, previous_response_id=previous, **forced, **target
            )
            if stream:
                done = [event async for event in done][-1].response
            previous = done.id
            calls = [item for item in done.output if item.type == "function_call"]
            if not calls:
                break
            items = [
                {"type": "function_call_output", "call_id": c.call_id, "output": call_tool(c.name, c.arguments)}
                for c in calls
            ]
        answers.append("".join(p.text for item in done.output if item.type == "message" for p in item.content))
    return answers


async def openai(*, api: str, stream: bool) -> Answers:
    """Run the loop of tools here, over chat completions; litellm and pydantic-ai ask Responses by the same package."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=BASE_URL, api_key=KEY)
    tools: Any = [{"type": "function", "function": function} for function in FUNCTIONS]
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    answers = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        for turn in range(MAX_TURNS):
            asked: Any = {"model": MODEL, "messages": messages, "tools": tools}
            asked |= {"tool_choice": "required"} if FORCES and not turn else {}
            if stream:
                async with client.chat.completions.stream(**asked) as events:
                    done: Any = await events.get_final_completion()
            else:
                done = await client.chat.completions.create(**asked)
            said = done.choices[0].message
            messages.append(said.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
            if not said.tool_calls:
                answers.append(said.content)
                break
            for call in said.tool_calls:
                result = call_tool(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return answers


async def anthropic(*, api: str, stream: bool) -> Answers:
    """Run the loop of tools here."""
    from anthropic import AsyncAnthropic

    client = AsyncAnthropic(base_url=BASE_URL, api_key=KEY)
    tools: Any = [{"name": each["name"], "input_schema": each["parameters"]} for each in FUNCTIONS]
    messages: list[Any] = []
    answers = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        for turn in range(MAX_TURNS):
            asked: Any = {"model": MODEL, "system": SYSTEM, "messages": messages, "tools": tools, "max_tokens": 512}
            asked |= {"tool_choice": {"type": "any"}} if FORCES and not turn else {}
            if stream:
                async with client.messages.stream(**asked) as events:
                    done: Any = await events.get_final_message()
            else:
                done = await client.messages.create(**asked)
            messages.append({"role": "assistant", "content": [block.model_dump() for block in done.content]})
            calls = [block for block in done.content if block.type == "tool_use"]
            if not calls:
                answers.append("".join(block.text for block in done.content if block.type == "text"))
                break
            results = [(call.id, call_tool(call.name, json.dumps(call.input))) for call in calls]
            blocks = [{"type": "tool_result", "tool_use_id": i, "content": result} for i, result in results]
            messages.append({"role": "user", "content": blocks})
    return answers


async def google_genai(*, api: str, stream: bool) -> Answers:
    """Run the loop of tools here, over the package's chat, which keeps the history."""
    import google.genai as genai
    from google.genai import types

    client = genai.Client(api_key=KEY, http_options=types.HttpOptions(base_url=BASE_URL))
    declared = [
        types.FunctionDeclaration(
            name=each["name"], description=each["description"], parameters_json_schema=each["parameters"]
        )
        for each in FUNCTIONS
    ]
    settings: Any = {"system_instruction": SYSTEM, "tools": [types.Tool(function_declarations=declared)]}
    forced: Any = {**settings, "tool_config": {"function_calling_config": {"mode": "ANY"}}}
    chat: Any = client.aio.chats.create(model=MODEL, config=settings)
    answers = []
    for question in QUESTIONS:
        message: Any = question
        for turn in range(MAX_TURNS):
            config = forced if FORCES and not turn else settings
            if stream:
                chunks = [chunk async for chunk in await chat.send_message_stream(message, config=config)]
            else:
                chunks = [await chat.send_message(message, config=config)]
            parts = [part for chunk in chunks for part in chunk.candidates[0].content.parts]
            calls = [part.function_call for part in parts if part.function_call]
            if not calls:
                answers.append("".join(part.text for part in parts if part.text and not part.thought))
                break
            message = [
                types.Part.from_function_response(name=call.name, response={"result": TOOLS[call.name](**call.args)})
                for call in calls
            ]
    return answers


CLIENTS: dict[str, Callable[[], Coroutine[Any, Any, Answers]]] = {
    f"{run.__name__.replace('_', '-')}:{api}{':stream' if stream else ''}": partial(run, api=api, stream=stream)
    for run, apis in (
        (openai, ("chat",)),
        (anthropic, ("messages",)),
        (google_genai, ("gemini",)),
        (openai_agents, ("chat", "responses")),
        (langgraph, ("chat", "responses")),
        (smolagents, ("chat",)),
        (pydantic_ai, ("chat", "responses", "messages")),
        (litellm, ("chat", "responses", "messages")),
    )
    for api in apis
    for stream in (False, True)
}

if __name__ == "__main__":
    answers = asyncio.run(CLIENTS[sys.argv[1]]())
    print(f"\n{json.dumps(answers)}")  # after what the framework may have written
