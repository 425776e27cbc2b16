"""Ask a server the questions of tests/serve/test_clients.py with a real client: python ask.py CLIENT URL IMAGE.

Prints a JSON object: what the client gives back for each question, or the error that it shows. It runs in the clients'
own environment, without whet.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import sys
from collections.abc import Callable
from typing import Any

MODEL, KEY = "model", "none"
DRAW: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
QUESTION, INSTRUCTION = "What is 17 + 4?", "Answer briefly."
ASK: list[Any] = [{"role": "user", "content": QUESTION}]
BRIEF: list[Any] = [{"role": "system", "content": INSTRUCTION}, *ASK]
CALL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}

Questions = dict[str, Callable[[], Any]]


def seen(image: str) -> list[Any]:
    parts = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": QUESTION}]
    return [{"role": "user", "content": parts}]


def add() -> int:
    """Add the numbers."""
    return 0


def openai(url: str, image: str) -> Questions:
    from openai import OpenAI

    create = OpenAI(base_url=url, api_key=KEY, max_retries=0).chat.completions.create

    def ask(messages: list[Any] = ASK, model: str = MODEL, **more: Any) -> Any:
        return create(model=model, messages=messages, **DRAW, **more)

    return {
        "chat": lambda: ask().choices[0].message.content,
        "stream": lambda: "".join(part.choices[0].delta.content or "" for part in ask(stream=True)),
        "log-probabilities": lambda: [
            token.logprob for token in ask(logprobs=True).choices[0].logprobs.content
        ],
        "system": lambda: ask(BRIEF).choices[0].message.content,
        "image": lambda: ask(seen(image)).choices[0].message.content,
        "tools": lambda: ask(tools=[CALL]),
        "error": lambda: ask(model="nobody"),
    }


def litellm(url: str, image: str) -> Questions:
    from litellm import completion

    def ask(messages: list[Any] = ASK, model: str = MODEL, **more: Any) -> Any:
        return completion(
            model=f"openai/{model}", messages=messages, api_base=url, api_key=KEY, **DRAW, **more
        )

    return {
        "chat": lambda: ask().choices[0].message.content,
        "stream": lambda: "".join(part.choices[0].delta.content or "" for part in ask(stream=True)),
        "log-probabilities": lambda: [
            token["logprob"] for token in ask(logprobs=True).choices[0].logprobs.content
        ],
        "system": lambda: ask(BRIEF).choices[0].message.content,
        "image": lambda: ask(seen(image)).choices[0].message.content,
        "tools": lambda: ask(tools=[CALL]),
        "error": lambda: ask(model="nobody"),
    }


def langchain(url: str, image: str) -> Questions:
    from langchain_openai import ChatOpenAI

    def of(model: str = MODEL, **more: Any) -> Any:
        return ChatOpenAI(model=model, base_url=url, api_key=KEY, max_retries=0, **DRAW, **more)

    return {
        "chat": lambda: of().invoke(ASK).content,
        "stream": lambda: "".join(part.content for part in of().stream(ASK)),
        "log-probabilities": lambda: [
            token["logprob"]
            for token in of(logprobs=True).invoke(ASK).response_metadata["logprobs"]["content"]
        ],
        "system": lambda: of().invoke(BRIEF).content,
        "image": lambda: of().invoke(seen(image)).content,
        "tools": lambda: of().bind_tools([add]).invoke(ASK),
        "error": lambda: of("nobody").invoke(ASK),
    }


def pydantic_ai(url: str, image: str) -> Questions:
    from pydantic_ai import Agent, ImageUrl
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    def of(model: str = MODEL, settings: dict[str, Any] | None = None, **more: Any) -> Any:
        served = OpenAIChatModel(model, provider=OpenAIProvider(base_url=url, api_key=KEY))
        return Agent(served, model_settings={**DRAW, **(settings or {})}, retries=0, **more)

    async def stream() -> str:
        async with of().run_stream(QUESTION) as result:
            return "".join([part async for part in result.stream_text(delta=True, debounce_by=None)])

    def logprobs() -> list[float]:
        done = of(settings={"openai_logprobs": True}).run_sync(QUESTION)
        return [token["logprob"] for token in done.all_messages()[-1].provider_details["logprobs"]]

    return {
        "chat": lambda: of().run_sync(QUESTION).output,
        "stream": lambda: asyncio.run(stream()),
        "log-probabilities": logprobs,
        "system": lambda: of(system_prompt=INSTRUCTION).run_sync(QUESTION).output,
        "image": lambda: of().run_sync([ImageUrl(url=image), QUESTION]).output,
        "tools": lambda: of(tools=[add]).run_sync(QUESTION),
        "error": lambda: of("nobody").run_sync(QUESTION),
    }


def smolagents(url: str, image: str) -> Questions:
    from smolagents import OpenAIModel, tool

    def of(model: str = MODEL) -> Any:
        return OpenAIModel(model_id=model, api_base=url, api_key=KEY, **DRAW)

    return {
        "chat": lambda: of().generate(ASK).content,
        "stream": lambda: "".join(part.content or "" for part in of().generate_stream(ASK)),
        "system": lambda: of().generate(BRIEF).content,
        "image": lambda: of().generate(seen(image)).content,
        "tools": lambda: of().generate(ASK, tools_to_call_from=[tool(add)]),
        "error": lambda: of("nobody").generate(ASK),
    }


def openai_agents(url: str, image: str) -> Questions:
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)

    def of(model: str = MODEL, **more: Any) -> Any:
        client = AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0)
        served = OpenAIChatCompletionsModel(model=model, openai_client=client)
        return Agent(name="asked", model=served, model_settings=ModelSettings(**DRAW), **more)

    async def stream() -> str:
        events = Runner.run_streamed(of(), QUESTION).stream_events()
        parts = [event.data async for event in events if event.type == "raw_response_event"]
        return "".join(part.delta for part in parts if part.type == "response.output_text.delta")

    parts = [
        {"type": "input_image", "image_url": image, "detail": "auto"},
        {"type": "input_text", "text": QUESTION},
    ]
    return {
        "chat": lambda: Runner.run_sync(of(), QUESTION).final_output,
        "stream": lambda: asyncio.run(stream()),
        "system": lambda: Runner.run_sync(of(instructions=INSTRUCTION), QUESTION).final_output,
        "image": lambda: Runner.run_sync(of(), [{"role": "user", "content": parts}]).final_output,
        "tools": lambda: Runner.run_sync(of(tools=[function_tool(add)]), QUESTION),
        "error": lambda: Runner.run_sync(of("nobody"), QUESTION),
    }


PACKAGES: dict[str, Callable[[str, str], Questions]] = {
    "openai": openai,
    "litellm": litellm,
    "langchain-openai": langchain,
    "pydantic-ai-slim": pydantic_ai,
    "smolagents": smolagents,
    "openai-agents": openai_agents,
}


def said(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except Exception as error:
        return {"error": str(error)}


if __name__ == "__main__":
    package, url, image = sys.argv[1:]
    answers = {name: said(question) for name, question in PACKAGES[package](url, image).items()}
    answers["version"] = importlib.metadata.version(package)
    print(json.dumps(answers, default=str))
