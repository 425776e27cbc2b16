"""`whet watch`: who may ask, what is answered, and one clear line for every mistake; over real sockets."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import needs

from whet.install import install_command
from whet.model.text.tokenizer import Tokenizer
from whet.report.watch import WatchConfig, _page, main
from whet.types import UserError

uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from whet.report.watch import (  # noqa: E402
    Guard,
    Runs,
    build_app,
)

TOKEN = "t0ken-of-the-test"
RUN = "a <b>run\u202e"


def sample(step: int, index: int, **fields: Any) -> dict[str, Any]:
    return {
        "step": step,
        "uid": f"u{step}",
        "index": index,
        "prompt": "p",
        "answer": "1",
        "completion": f"<think>x</think> {index}",
        "num_completion_tokens": 3,
        "finish_reason": "stop",
        "rewards": {"correct": float(index % 2)},
        "reward": float(index % 2),
        "advantage": 0.0,
        **fields,
    }


def write_run(folder: Path, num_steps: int = 3) -> Path:
    """Write a small run folder; its last sample has log-probabilities of a letter that is cut into two tokens."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("num_steps: 10\ntask: <script>\n")
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, num_steps + 1):
            row = {"stage": "rl", "step": step, "time_s": time.time(), "rl/correct": 0.1 * step}
            file.write(json.dumps(row) + "\n")
    tokenizer = Tokenizer.bytes()
    ids = tokenizer.encode("né") + [10**6, -1]
    last = sample(num_steps, 4, completion="né", completion_ids=ids, sampler_logprobs=[-0.5] * len(ids))
    with (folder / "samples.jsonl").open("w") as file:
        for step in range(1, num_steps + 1):
            file.writelines(json.dumps(sample(step, index)) + "\n" for index in range(4))
        file.write(json.dumps(last) + "\n")
    tokenizer.save(folder / "checkpoints" / "step_00000001")
    return folder


class Site:
    """A running server; `get` returns status, headers and text."""

    def __init__(self, root: Path) -> None:
        self.runs = Runs(root)
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        guard = Guard(build_app(self.runs), token=TOKEN, cookie="whet", hosts=("127.0.0.1", "localhost"))
        config = uvicorn.Config(
            guard, http="h11", ws="none", lifespan="off", log_level="error", server_header=False
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]})
        self.thread.start()

    def get(self, path: str, *, method: str = "GET", **headers: str) -> tuple[int, Any, str]:
        headers = {"cookie": f"whet={TOKEN}", **headers}
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, answer.headers, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers, error.read().decode()

    def data(self, path: str) -> Any:
        status, _, text = self.get(path)
        assert status == 200, text
        return json.loads(text)

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)
        self.runs.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    write_run(tmp_path / "runs" / RUN)
    found = Site(tmp_path / "runs")
    yield found
    found.close()


def indexed(site: Site, count: int, run: str = "") -> dict[str, Any]:
    """Wait until samples are indexed."""
    deadline = time.monotonic() + 20
    while (info := site.data(f"/api/info?run={run}"))["num_indexed"] < count and time.monotonic() < deadline:
        time.sleep(0.02)
    assert info["num_indexed"] == count
    return info


def quoted() -> str:
    return urllib.parse.quote(RUN)


def test_nobody_gets_in_without_the_token(site: Site) -> None:
    for headers in (
        {"cookie": ""},
        {"cookie": "whet=wrong"},
        {"cookie": f"other={TOKEN}"},
        {"cookie": "\xff=;;"},
    ):
        for path in ("/", "/api/state", "/api/samples?run=.", "/favicon.ico", "/nothing", "/?token=wrong"):
            status, given, text = site.get(path, **headers)
            assert status == 403, (headers, path)
            assert "run" not in text
            assert "set-cookie" not in given
    assert site.get("/")[0] == 200
    status, given, _ = site.get(f"/?token={TOKEN}", cookie="")
    assert status == 200
    assert given["set-cookie"] == f"whet={TOKEN}; Path=/; HttpOnly; SameSite=Strict"


def test_foreign_names_and_methods_are_refused(site: Site) -> None:
    for host in (
        "evil.example",
        f"evil.example:{site.port}",
        "127.0.0.1.evil.example",
        "",
        "[::2]:80",
        "10.0.0.1",
    ):
        assert site.get("/", host=host)[0] == 421, host
    for host in (
        "localhost",
        "localhost:9999",
        f"127.0.0.1:{site.port}",
        "LOCALHOST:1",
    ):  # ssh -L has another port
        assert site.get("/", host=host)[0] == 200, host
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        status, _, text = site.get("/api/info", method=method)
        assert (status, text) == (405, "whet watch: only GET and HEAD are supported\n")


def test_every_answer_has_the_safe_headers(site: Site) -> None:
    for path, headers in (
        ("/", {}),
        ("/api/state?run=" + quoted(), {}),
        ("/", {"cookie": ""}),
        ("/nothing", {}),
    ):
        _, given, _ = site.get(path, origin="http://evil.example", **headers)
        assert given["cache-control"] == "no-store"
        assert given["x-content-type-options"] == "nosniff"
        assert given["referrer-policy"] == "no-referrer"
        assert given["x-frame-options"] == "DENY"
        assert given["cross-origin-resource-policy"] == "same-origin"
        assert not any(name.lower().startswith("access-control") for name in given)
        assert given["server"] is None
    assert "frame-ancestors 'none'" in site.get("/")[1]["content-security-policy"]
    assert "default-src 'none'" in site.get("/api/info?run=" + quoted())[1]["content-security-policy"]


def test_the_page_shows_hostile_names_as_text(site: Site) -> None:
    text = site.get("/")[2]  # the only run, opened at once
    assert "<script>" not in text.split("<main>")[1].split("</main>")[0]
    assert "num_steps: 10\ntask: &lt;script&gt;" in text
    assert "<b>run" not in text
    assert "\u202e" not in text
    write_run(site.runs.roots[""] / "other")
    text = site.get("/")[2]
    assert "a &lt;b&gt;run\\u202e" in text
    assert "step 3 of 10" in text
    assert site.get("/?run=other")[0] == 200
    assert site.get("/?run=nobody")[0] == 404


def test_samples_are_found_by_every_filter(site: Site) -> None:
    run = quoted()
    info = indexed(site, 13, run)
    assert (info["steps"], info["rewards"], info["has_logprobs"]) == ([1, 3], ["correct"], True)

    def found(options: str) -> list[tuple[int, int]]:
        return [(row["step"], row["index"]) for row in site.data(f"/api/samples?run={run}&{options}")["rows"]]

    assert found("step_min=2&step_max=2&correct=true") == [(2, 3), (2, 1)]
    assert found("uid=u1&descending=false&limit=2&offset=1") == [(1, 1), (1, 2)]
    assert found("reward=correct&reward_min=0.5&order=reward&finish=stop&limit=1") == [(3, 3)]
    assert found("text=N%C3%89") == [(3, 4)]
    first = site.data(f"/api/samples?run={run}&limit=2")["rows"]
    assert len(site.data(f"/api/group?run={run}&id={first[0]['id']}")) == 5
    part = site.data(f"/api/samples?run={run}&text=think&limit=1")
    rest = site.data(f"/api/samples?run={run}&text=think&after={part['next']}")
    assert len(part["rows"] + rest["rows"]) == 12


def test_tokens_are_spelt_with_the_runs_own_checkpoint(site: Site) -> None:
    run = quoted()
    indexed(site, 13, run)
    rows = site.data(f"/api/samples?run={run}&limit=2")["rows"]
    row = site.data(f"/api/sample?run={run}&id={rows[0]['id']}")
    assert row["pieces"] == ["n", "", "é", "", "\ufffd\ufffd"]  # two ids that it does not have
    assert len(row["sampler_logprobs"]) == 5
    plain = site.data(f"/api/sample?run={run}&id={rows[1]['id']}")
    assert plain["pieces"] is None
    assert plain["prompt"] == "p"


def test_curves_come_once_and_a_deleted_run_says_so(site: Site) -> None:
    run = quoted()
    state = site.data(f"/api/state?run={run}")
    assert state["status"]["text"].startswith("running · step 3 of 10")
    with (site.runs.roots[""] / RUN / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"stage": "rl", "step": 4, "time_s": time.time(), "rl/correct": 0.9}) + "\n")
    newer = site.data(f"/api/state?run={run}&cursor={state['cursor']}")
    assert [s["steps"] for f in newer["figures"] for p in f["panels"] for s in p["series"]] == [[4]]
    (site.runs.roots[""] / RUN).rename(site.runs.roots[""].parent / "moved")
    assert site.data(f"/api/state?run={run}&cursor={newer['cursor']}")["status"]["kind"] == "gone"
    assert "no run in this folder" in site.get("/")[2]


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/api/state?run=../outside", "no such run"),
        ("/api/state?run=/etc", "no such run"),
        ("/api/state?run=linked", "no such run"),
        ("/api/state?run=leads%20out", "samples.jsonl leads outside of the folder"),
        ("/api/samples?run={run}&limit=9999", "limit = 9999: expected 1 to 500"),
        ("/api/samples?run={run}&order=name", "expected one of step, reward, length, advantage"),
        ("/api/samples?run={run}&step_min=one", "step_min = 'one': expected int"),
        ("/api/samples?run={run}&correct=1", "correct = '1': expected bool"),
        ("/api/samples?run={run}&reward_min=[[", "reward_min = '[[': expected float"),
        ("/api/samples?run={run}&after=-1", "after = '-1': expected the id of a sample"),
        ("/api/sample?run={run}&id=../../etc/passwd", "expected the id of a sample"),
        ("/api/group?run={run}&file=x&id=0", "unknown option 'file'"),
    ],
)
def test_bad_requests_get_one_clear_line(site: Site, path: str, message: str) -> None:
    outside = write_run(site.runs.roots[""].parent / "outside")
    (site.runs.roots[""] / "linked").symlink_to(outside)
    stray = write_run(site.runs.roots[""] / "leads out")
    (stray / "samples.jsonl").unlink()
    (stray / "samples.jsonl").symlink_to(outside / "samples.jsonl")
    status, _, text = site.get(path.format(run=quoted()))
    assert status == 400
    error = json.loads(text)["error"]
    assert message in error
    assert "\n" not in error
    assert site.get(f"/api/sample?run={quoted()}&id=7")[0] == 404


def test_few_runs_are_open_at_a_time(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    for number in range(7):
        write_run(tmp_path / f"run{number}", num_steps=1)
    first = runs.get("run0")
    for name in runs.names():
        runs.get(name)
    alive = [thread for thread in threading.enumerate() if thread.name == "samples"]
    deadline = time.monotonic() + 20
    while len(alive) > 4 and time.monotonic() < deadline:
        time.sleep(0.05)
        alive = [thread for thread in threading.enumerate() if thread.name == "samples"]
    assert len(alive) == 4
    assert runs.get("run0") is not first
    runs.close()


def test_runs_are_found_below_a_folder(tmp_path: Path) -> None:
    for name in ("a", "b/c", "b/c/d/e", "b/c/d/e/f", "checkpoints/x", ".hidden/y"):
        write_run(tmp_path / name, num_steps=1)
    assert Runs(tmp_path).names() == ["a", "b/c", "b/c/d/e"]
    (tmp_path / "z").mkdir()
    assert Runs(tmp_path / "z").names() == []
    (tmp_path / "z" / "config.yaml").write_text("")  # a run that only begins
    assert Runs(tmp_path / "z").names() == ["."]


def test_several_folders_are_watched_together(tmp_path: Path) -> None:
    for name in ("a/rl", "b/rl", "c", "secret"):
        write_run(tmp_path / name, num_steps=1)
    runs = Runs(tmp_path / "a" / "rl", tmp_path / "b" / "rl", tmp_path / "c")
    assert runs.names() == ["a/rl", "b/rl", "c"]
    assert runs.folder("b/rl") == tmp_path / "b" / "rl" / "."
    page = _page(runs, runs.names(), "b/rl")
    assert [part.split('"')[0] for part in page.split('class="overlay" value="')[1:]] == ["a/rl", "c"]
    assert page.count(" checked>") == 2  # drawn beside it without a click
    assert runs.get("b/rl").follower.state()["status"]["step"] == 1
    for name in ("secret", "../secret", "c/../secret"):
        with pytest.raises(UserError, match="there is no such run"):
            runs.get(name)
    runs.close()
    with pytest.raises(UserError, match="given twice"):
        Runs(tmp_path / "c", tmp_path / "b" / ".." / "c")


@pytest.mark.ci
def test_the_program_prints_one_line_and_ends_quietly(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    code = "import sys; from whet.report.watch import *; main(WatchConfig(run=(sys.argv[1],), open=False))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    address = next(word for word in line.split() if word.startswith("http://127.0.0.1:"))
    with urllib.request.urlopen(address, timeout=20) as answer:
        assert "run" in answer.read().decode()
        assert answer.headers["set-cookie"].startswith("whet_")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out.strip(), err) == (0, "", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"run": ""}, "needs a run folder"),
        ({"run": "none"}, "no such run or folder"),
        ({"run": "file"}, "this is a file"),
        ({"run": "empty"}, "no run in this folder or below it"),
        ({"run": "run", "host": "0.0.0.0"}, "other machines could read the run"),
        ({"run": "run", "host": "example.invalid"}, "other machines could read the run"),
        ({"run": "run", "host": "203.0.113.7", "expose": True}, "cannot be used"),
        ({"run": "run", "host": "no such name.invalid", "expose": True}, "not an address of this machine"),
        ({"run": "run", "port": -1}, "expected a free port"),
    ],
)
def test_mistakes_get_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        if options.get("port") == -1:
            options = {**options, "port": taken.getsockname()[1]}
        with pytest.raises(UserError, match=rf"^[^\n]*{message}[^\n]*$"):
            main(WatchConfig(open=False, **options | {"run": (options["run"],)}))


def test_a_missing_extra_and_a_port_beyond_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(UserError, match=re.escape(f"whet watch needs uvicorn: {install_command('web')}")):
        main(WatchConfig(run=(str(tmp_path),)))
    with pytest.raises(ValueError, match=r"^port = 65536: expected 0"):
        WatchConfig(port=65536)


@needs("ordinary user")
def test_an_unreadable_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0)
    with pytest.raises(UserError, match="cannot be read"):
        main(WatchConfig(run=(str(tmp_path / "run"),)))


def test_an_exposed_site_answers_to_numbers_alone() -> None:
    guard = Guard(lambda *_: None, token="t", cookie="c", hosts=None)
    assert guard._is_named("192.168.1.5:80")
    assert guard._is_named("[fe80::1]:80")
    assert not guard._is_named("rebound.example:80")


@pytest.mark.parametrize("beside", ['other={"a": 1}', "a b=1", "x", "=", 'q="', "\xff=1"])
def test_cookies_of_other_programs_do_not_lock_the_reader_out(beside: str) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def status(cookie: str) -> int:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"host", b"127.0.0.1:1"), (b"cookie", cookie.encode("latin-1"))]
        scope = {"type": "http", "method": "GET", "query_string": b"", "headers": headers}
        await Guard(app, token=TOKEN, cookie="whet_1", hosts=("127.0.0.1",))(scope, None, send)
        return sent[0]["status"]

    assert asyncio.run(status(f"{beside}; whet_1={TOKEN}; z=1")) == 200
    assert asyncio.run(status(f"{beside}; whet_1={TOKEN[1:]}")) == 403
    assert asyncio.run(status(f"{beside}; xwhet_1={TOKEN}; whet_1")) == 403


def test_links_below_the_checkpoints_do_not_lead_out(tmp_path: Path) -> None:
    write_run(tmp_path / "root" / "run")
    write_run(tmp_path / "other")
    link = tmp_path / "root" / "run" / "checkpoints" / "step_00000009"
    link.symlink_to(tmp_path / "other" / "checkpoints" / "step_00000001")
    with pytest.raises(UserError, match="checkpoints/step_00000009 leads outside"):
        Runs(tmp_path / "root").get("run")
    link.unlink()
    link.symlink_to(link)  # a link to itself
    runs = Runs(tmp_path / "root")
    runs.get("run")
    runs.close()
