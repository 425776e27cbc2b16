"""Real clients of `whet serve`, in environments of their own (`make slow`), and the table of them in docs/serve.md.

PYTHONPATH=tests python tests/serve/test_clients.py writes the table; a test compares it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from needs import require
from seeing import save_model, uri

from whet import processes
from whet.generate.policy import PolicyConfig, load_policy
from whet.model.text.tokenizer import Tokenizer
from whet.schema import SCHEMAS

HERE = Path(__file__).parent / "clients"
PAGE = Path(__file__).parents[2] / "docs" / "serve.md"
FEATURES = ("chat", "stream", "log-probabilities", "system", "image")
"""What is served; each is compared with what plain HTTP gives."""
REFUSED = {
    "tools": "is not supported by this server: leave it out",
    "error": "the model 'nobody' does not exist",
}
"""What is refused, with the words that clients have to show."""
CLIENTS: dict[str, tuple[str, ...]] = {
    "openai": FEATURES,
    "litellm": FEATURES,
    "langchain-openai": FEATURES,
    "pydantic-ai-slim": FEATURES,
    "smolagents": ("chat", "stream", "system", "image"),
    "openai-agents": ("chat", "stream", "system", "image"),
    "openai (npm)": FEATURES,
    "ai (npm)": ("chat", "stream", "system", "image"),
}
"""Clients, and what of it each can ask for."""
HARNESSES = {"guidellm": ("stream",)}
"""Programs that measure a server, and what they ask for."""
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for p in m['content'] %}{% if p['type'] == 'image' %}<image>{% else %}{{ p['text'] }}"
    "{% endif %}{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
IMAGE = uri(1, 200)
NPM = " (npm)"
BEGIN, END = "<!-- clients -->\n", "<!-- end of clients -->"


def versions() -> dict[str, str]:
    """Return the version of each client that is installed for the tests."""
    pins = re.findall(r"^([\w-]+)(?:\[\w+\])?==(\S+)$", (HERE / "requirements.txt").read_text(), re.MULTILINE)
    npm = json.loads((HERE / "package.json").read_text())["dependencies"]
    return dict(pins) | {f"{name}{NPM}": version for name, version in npm.items()}


def table() -> str:
    """Return the table of docs/serve.md."""
    heads = (*FEATURES, *REFUSED)
    lines = [f"| client | version | {' | '.join(heads)} |", f"|---|---|{':-:|' * len(heads)}"]
    for name, features in CLIENTS.items():
        marks = ["yes" if feature in features else "–" for feature in FEATURES]
        lines.append(f"| {name} | {versions()[name]} | {' | '.join(marks)} | refused | shown |")
    for name, features in HARNESSES.items():
        marks = ["yes" if feature in features else "–" for feature in heads]
        lines.append(f"| {name} | {versions()[name]} | {' | '.join(marks)} |")
    return "\n".join(lines) + "\n"


def test_the_table_of_clients_is_what_the_tests_run() -> None:
    assert PAGE.read_text().partition(BEGIN)[2].partition(END)[0] == table()


def make_model(folder: Path) -> Path:
    """Save a model that sees, and writes letters alone."""
    tokenizer = Tokenizer.bytes([*SCHEMAS["think_answer"].tags, "<image>"]).with_template(TEMPLATE)
    save_model(folder / "made", tokenizer=tokenizer, max_positions=512)
    policy = load_policy(PolicyConfig(init=str(folder / "made"), schema="none", system_prompt=False), seed=0)
    others = [index for index in range(tokenizer.vocab_size) if index not in {*range(97, 123), 32}]
    with torch.no_grad():
        policy.model.head_weight[others] = 0.0
    policy.save(folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("clients"))


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    """The address of the program."""
    words = [sys.executable, "-m", "whet", "serve", str(model)]
    words += ["--port", "0", "--policy.schema", "none", "--policy.num-threads", "1", "--context", "512"]
    with processes.start(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("serving"))
        yield line.partition(" at ")[2].split()[0]
        process.terminate()


def plain(url: str, *messages: Any, **more: Any) -> Any:
    """Return the choice that plain HTTP gets."""
    body = {"model": "model", "messages": messages, "temperature": 0, "max_tokens": 12} | more
    return (
        httpx.post(f"{url}/chat/completions", json=body, timeout=60).raise_for_status().json()["choices"][0]
    )


def command(name: str) -> list[str]:
    """Return what runs a client; skip where it is not installed."""
    if not name.endswith(NPM):
        require("clients")
        return [os.environ["CLIENTS_PYTHON"], str(HERE / "ask.py"), name]
    require("clients of npm")
    # Beside the packages, where they are looked for.
    script = shutil.copy(HERE / "ask.mjs", os.environ["CLIENTS_NODE"])
    return ["node", str(script), name.removesuffix(NPM)]


@pytest.mark.slow
@pytest.mark.parametrize("name", CLIENTS)
def test_a_real_client(name: str, request: pytest.FixtureRequest) -> None:
    words, url = command(name), request.getfixturevalue("url")
    done = subprocess.run([*words, url, IMAGE], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    question = {"role": "user", "content": "What is 17 + 4?"}
    system = {"role": "system", "content": "Answer briefly."}
    parts = [{"type": "image_url", "image_url": {"url": IMAGE}}, {"type": "text", "text": "What is 17 + 4?"}]
    alone = plain(url, question, logprobs=True)
    text = alone["message"]["content"]
    expected = {
        "chat": text,
        "stream": text,
        "log-probabilities": [token["logprob"] for token in alone["logprobs"]["content"]],
        "system": plain(url, system, question)["message"]["content"],
        "image": plain(url, {"role": "user", "content": parts})["message"]["content"],
    }
    assert len({expected[feature] for feature in ("chat", "system", "image")}) == 3
    assert {name: found[name] for name in CLIENTS[name]} == {name: expected[name] for name in CLIENTS[name]}
    for feature, told in REFUSED.items():
        assert told in found[feature]["error"]
    assert found["version"] == versions()[name]


@pytest.mark.slow
def test_guidellm_reports_what_it_asked_for(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Its program as it comes: of six chats, two at a time, every number that can be known is right."""
    require("clients")
    model, url = (request.getfixturevalue(name) for name in ("model", "url"))
    server = url.removesuffix("/v1")
    options = {
        "backend": f"kind=openai_http,target={server}",
        "profile": "kind=concurrent,streams=2",
        "constraint": "kind=max_requests,count=6",
        "data": "kind=synthetic_text,prompt_tokens=20,output_tokens=9",
        "tokenizer": f"kind=huggingface_auto,model={model}",
        "output": f"kind=json,path={tmp_path / 'report.json'}",
    }
    program = Path(os.environ["CLIENTS_PYTHON"]).with_name("guidellm")
    words = [str(program), "run", *(word for name, value in options.items() for word in (f"--{name}", value))]
    began = time.time()
    done = subprocess.run(
        [*words, "--disable-console-interactive"], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["metadata"]["guidellm_version"] == versions()["guidellm"]
    (measured,) = report["benchmarks"]
    assert measured["metrics"]["request_totals"] == {
        "successful": 6,
        "errored": 0,
        "incomplete": 0,
        "total": 6,
    }
    for row in measured["requests"]["successful"]:
        asked = json.loads(row["request_args"])["body"]
        prompt = {"model": "model", "messages": asked["messages"]}
        count = httpx.post(f"{server}/tokenize", json=prompt, timeout=60).raise_for_status().json()["count"]
        assert (row["prompt_tokens"], row["output_tokens"], row["total_tokens"]) == (count, 9, count + 9)
        assert 0 < row["time_to_first_token_ms"] / 1000 <= row["request_latency"] < time.time() - began
    total = measured["metrics"]["output_token_count"]["successful"]
    assert (total["count"], total["total_sum"], total["min"], total["max"]) == (6, 54, 9, 9)


if __name__ == "__main__":
    head, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}{table()}{END}{rest.partition(END)[2]}")
