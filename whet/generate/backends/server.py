"""A server as sampler: token ids in, token ids and their log-probabilities out.

Three kinds of server give what is needed, and are asked in their own words (`whet.generate.backends.dialects`):
`whet serve`, whose completions equal those of the engine here bit by bit, vLLM and SGLang, whose differ by their
kernels' rounding. Re-tokenised text is never trained on: a server that gives no ids is refused.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import urlsplit

import torch

from whet.config import user_path
from whet.generate.backends.base import SamplerConfig
from whet.generate.backends.dialects import DIALECTS, Dialect, Raw, RefusedError, Vllm
from whet.generate.engine import EngineStats
from whet.generate.policy import Policy
from whet.generate.rows import Completion, OnEnded, Request
from whet.generate.sampling import SamplingParams
from whet.install import install_command
from whet.model.files import read_json
from whet.model.lora.trained import Trained
from whet.model.names import as_stored
from whet.model.transformer import SIDE_NAMES
from whet.model.weights import save_model
from whet.ranks.broadcast import WeightGroup, address_towards, free_port
from whet.ranks.collectives import all_reduce_sum, gather_json, rank
from whet.types import UserError

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

LOOK_S = 0.5
"""Seconds between looks at whether the run shall stop, while nothing ends."""
BACKOFF_S = 0.5
"""Pause before the first repetition; it doubles each time, up to `LONGEST_S`."""
LONGEST_S = 30.0
CLOSE_S = 5.0
"""Longest wait for a server's answer at the end of a run."""
PASSING = (408, 425, 429, 502, 503, 504)
"""Statuses of errors that pass."""
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"

Chunk = tuple[int, int, Request, tuple[int, ...]]
"""Place of a request, first place among its samples, the request, and the seeds to draw."""


class ServerSampler:
    """Samples at a server; the weights are handed over as files in a folder that both see.

    Args:
        config: Address and limits.
        policy: The policy, as it starts.
        on_close: Called at the end, by whoever started the server.
        unties: Whether the server was started with a head apart from the embeddings, see `write_weights`.

    Attributes:
        stats: Tokens drawn so far.
        look: Called between answers; may raise to end a call.

    Raises:
        UserError: If the server cannot be reached, has no such model, or no way to take weights.
    """

    def __init__(
        self,
        config: SamplerConfig,
        policy: Policy,
        *,
        on_close: Callable[[], None] | None = None,
        unties: bool = False,
    ) -> None:
        try:
            import httpx
        except ImportError:
            raise UserError(f"sampler.kind = openai needs httpx: {install_command('judge')}") from None
        self._httpx, self._config, self._policy = httpx, config, policy
        self._root = config.url.rstrip("/").removesuffix("/v1")
        self._where = f"sampler.url {config.url}"
        self._closed = threading.Event()
        self._client = self._connect()
        self._pool = ThreadPoolExecutor(config.concurrency, "whet-sampler")
        self._folder: Path | None = None
        self._on_close, self._unties = on_close, unties
        self.stats = EngineStats()
        self.look: Callable[[], None] = lambda: None
        card = self._card()
        self._dialect: Dialect = DIALECTS.get(str(card.get("owned_by")), Vllm)(policy, str(card["id"]))
        self._dialect.check()
        self._run, self._num_pushed = str(gather_json(secrets.token_hex(3))[0]), 0
        self._adapter = ""
        self._adapter_folder: Path | None = None
        self._group: WeightGroup | None = None
        if config.sync == "broadcast" and not self._dialect.takes_broadcasts:
            raise UserError(
                f"{self._where}: sampler.sync = broadcast is for whet serve and SGLang; of vLLM's server only its own "
                "library can join a group: use sampler.sync = file"
            )
        if config.sync == "broadcast" and policy.trained is not None:
            raise UserError(
                "sampler.sync = broadcast with lora.rank: adapters are handed over as files; use sampler.sync = file"
            )
        context = card.get("max_model_len")
        own = policy.model.config.max_positions
        self._context = min(own, context) if isinstance(context, int) and context > 0 else own

    @property
    def max_positions(self) -> int:
        """Longest context in tokens, prompt and completion together: the model's, or the server's if it is shorter."""
        return self._context

    def release(self, above: int = 0) -> None:
        """Do nothing: the server keeps its own memory."""

    def close(self) -> None:
        """End the connections and remove the files of weights."""
        if not self._closed.is_set() and self._on_close is None and rank() == 0:
            self._client.timeout = CLOSE_S
            with contextlib.suppress(UserError):
                self._drop(self._adapter)
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()
        if self._group is not None:
            self._group.close()
            self._group = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def push(self, version: int, policy: Policy) -> float:
        """Write the weights to a folder and let the server read it; with several ranks the first one does.

        Raises:
            UserError: If the server does not take them, with what it says.
        """
        began = time.monotonic()
        if policy.trained is not None:
            self._push_adapter(version, policy.trained)
        elif rank() == 0 and self._config.sync == "broadcast":
            self._broadcast(version, policy)
        elif rank() == 0:
            folder = self._exchange() / f"version-{version}"
            shutil.rmtree(folder, ignore_errors=True)
            try:
                write_weights(policy, folder, unties=self._unties)
                self._told(lambda: self._dialect.put_weights(self._post, folder, version))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        all_reduce_sum(0.0)  # no rank samples before the server has them
        return time.monotonic() - began

    def _broadcast(self, version: int, policy: Policy) -> None:
        """Send the weights through a group that server and trainer make at the first push."""
        if self._group is None:
            where = urlsplit(self._root)
            port = where.port or {"http": 80, "https": 443}[where.scheme]
            address = address_towards(where.hostname or "", port)
            size, backend = 1 + self._num_shares(), "nccl" if policy.device.type == "cuda" else "gloo"
            port, name = free_port(address), f"whet-{self._run}"
            options: dict[str, Any] = {"rank": 0, "size": size, "name": name, "backend": backend}
            options["timeout_s"] = self._config.timeout_s
            told = partial(self._dialect.join, self._post, address, port, size, name, backend)
            self._group = self._meanwhile(told, lambda: WeightGroup(address, port, **options))
        weights = named_weights(policy)
        if self._dialect.reads_stored:
            weights = as_stored(weights, policy.model.config)
        told = partial(self._dialect.receive, self._post, weights, f"whet-{self._run}", version)
        self._meanwhile(told, partial(self._group.send, list(weights.values())))

    def _meanwhile(self, ask: Callable[[], None], work: Callable[[], T]) -> T:
        """Do what the server takes part in when it is asked, and return that; fail as soon as it refuses."""
        asked, done = _begun(partial(self._told, ask)), _begun(work)
        both: list[Future[Any]] = [cast(Future[Any], asked), cast(Future[Any], done)]
        while left := [future for future in both if not future.done()]:
            wait(left, LOOK_S, FIRST_COMPLETED)
            if asked.done() and (error := asked.exception()) is not None:
                raise error  # the other one would wait for it until its time is over
            self.look()
        return done.result()

    def _num_shares(self) -> int:
        """Return how many processes of the server hold a share of the weights: SGLang's, one for each GPU."""
        if not self._dialect.reads_stored:
            return 1
        shares = self._send("GET", f"{self._root}/get_server_info", None).get("tp_size", 1)
        return shares if isinstance(shares, int) else 1

    def _push_adapter(self, version: int, trained: Trained) -> None:
        """Bring the adapter that is trained to the server, under a name that only these weights have."""
        old, self._num_pushed = self._adapter, self._num_pushed + 1
        # Several ranks ask one server: all have the name, the first one brings the files.
        self._adapter = f"whet-{self._run}-{self._num_pushed}"
        if rank() == 0:
            folder = self._exchange() / f"adapter-{version}"
            shutil.rmtree(folder, ignore_errors=True)
            trained.write(folder, is_plain=self._dialect.wants_plain)
            self._told(lambda: self._dialect.put_adapter(self._post, self._adapter, folder), is_adapter=True)
            self._drop(old)
            # A server may read the present one again, where its memory for adapters was used for others.
            if self._adapter_folder is not None and self._adapter_folder != folder:
                shutil.rmtree(self._adapter_folder, ignore_errors=True)
            self._adapter_folder = folder

    def _told(self, put: Callable[[], None], *, is_adapter: bool = False) -> None:
        """Bring something to the server; say what to do where it does not know how."""
        try:
            put()
        except RefusedError as error:
            if error.status not in (403, 404, 405):
                raise
            what, remedy = "weights", self._dialect.weights_remedy
            if is_adapter:
                what, remedy = "adapters", self._dialect.adapter_remedy
            raise UserError(f"{error}; it takes no {what}: {remedy}") from None

    def _drop(self, name: str) -> None:
        """Let the server forget an adapter that nothing is drawn with any more."""
        if name:
            with contextlib.suppress(RefusedError):
                self._dialect.drop_adapter(self._post, name)

    def generate(
        self,
        requests: Sequence[Request],
        params: SamplingParams,
        *,
        on_ended: OnEnded | None = None,
    ) -> list[list[Completion]]:
        """Draw every sample of every request, see `CopySampler.generate`.

        Raises:
            UserError: If a prompt leaves no room, the server fails for good, or its answer lacks something.
        """
        if params.is_filtered and not self._dialect.tells_filters:
            raise UserError(
                f"{self._where}: with sampling.top_k, top_p or min_p the trainer renormalises over what they left of "
                "each token's distribution, and only whet serve says what that was; leave them out"
            )
        began = time.perf_counter()
        rows: list[list[Completion | None]] = [[None] * len(request.seeds) for request in requests]
        futures: dict[Future[list[Completion]], Chunk] = {}
        try:
            for chunk in self._chunks(requests):
                futures[self._pool.submit(self._draw, chunk, params, self._adapter)] = chunk
            handed, pending = 0, set(futures)
            while handed < len(requests):
                while handed < len(requests) and all(done is not None for done in rows[handed]):
                    if on_ended is not None:
                        on_ended(handed, cast(list[Completion], rows[handed]))
                    handed += 1
                self.look()
                if not pending:
                    continue
                ended, pending = wait(pending, LOOK_S, FIRST_COMPLETED)
                for future in ended:
                    place, first, _, seeds = futures[future]
                    rows[place][first : first + len(seeds)] = future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            if (
                not self._closed.is_set()
            ):  # what is under way is given up: the server sees that nobody listens
                self._client.close()
                self._client = self._connect()
            raise
        drawn = cast(list[list[Completion]], rows)
        self.stats.new_tokens += sum(len(done.ids) for row in drawn for done in row)
        self.stats.seconds += time.perf_counter() - began
        return drawn

    def _chunks(self, requests: Sequence[Request]) -> Iterator[Chunk]:
        """Split what is asked for into requests to the server."""
        size = self._dialect.choices
        for place, request in enumerate(requests):
            if len(request.prompt_ids) >= self._context:
                raise UserError(
                    f"{self._where}: prompt {place} has {len(request.prompt_ids)} tokens, its context holds "
                    f"{self._context}: start the server with a longer one"
                )
            for first in range(0, len(request.seeds), size):
                yield place, first, request, request.seeds[first : first + size]

    def _draw(self, chunk: Chunk, params: SamplingParams, adapter: str) -> list[Completion]:
        """Draw some samples of a prompt, with the adapter that its batch began with."""
        _, _, request, seeds = chunk
        limit = min(params.max_new_tokens, request.max_new_tokens or params.max_new_tokens)
        limit = min(limit, self._context - len(request.prompt_ids))
        path, body = self._dialect.ask(request, seeds, limit, params, adapter)
        answer = self._send("POST", self._root + path, body)
        try:
            drawn = self._dialect.read(answer)
        except UserError as error:
            raise UserError(f"{self._where}: {error}") from None
        if len(drawn) != len(seeds):
            raise UserError(
                f"{self._where}: expected {len(seeds)} completions in its answer, got {len(drawn)}"
            )
        return [self._completion(raw, params) for raw in drawn]

    def _completion(self, raw: Raw, params: SamplingParams) -> Completion:
        """Check a completion strictly: what is trained on has to be what was drawn."""
        ids, logprobs, kept, reason = raw.ids, raw.logprobs, tuple(raw.kept), raw.reason
        if not isinstance(logprobs, list) or len(logprobs) != len(ids):
            raise UserError(
                f"{self._where}: expected a log-probability for each of {len(ids)} tokens in its answer"
            )
        rows = self._policy.tokenizer.vocab_size
        if not ids or not all(isinstance(index, int) and 0 <= index < rows for index in ids):
            raise UserError(
                f"{self._where}: expected token ids below {rows}, got {str(ids)[:120]}: another tokenizer?"
            )
        if not all(
            isinstance(value, float | int) and math.isfinite(value) and value <= 1e-3 for value in logprobs
        ):
            raise UserError(f"{self._where}: its log-probabilities are none: {str(logprobs)[:120]}")
        if reason not in ("stop", "length"):
            raise UserError(
                f"{self._where}: a completion ended for the reason {reason!r}, expected stop or length"
            )
        if params.is_filtered and len(kept) != len(ids):
            raise UserError(
                f"{self._where}: an older whet serve: it does not say what filters left; update it"
            )
        return Completion(
            ids=tuple(ids), logprobs=tuple(map(float, logprobs)), finish_reason=reason, kept=kept
        )

    def _card(self) -> dict[str, Any]:
        """Return the server's card of the model."""
        found = self._send("GET", f"{self._root}/v1/models", None)
        data = found.get("data")
        cards = [card for card in data if isinstance(card, dict)] if isinstance(data, list) else []
        cards = [card for card in cards if not card.get("parent")]  # the others are adapters on one of these
        names = [str(card.get("id")) for card in cards]
        if self._config.model:
            cards = [card for card in cards if card.get("id") == self._config.model]
        if len(cards) != 1:
            raise UserError(
                f"{self._where}: which of its models {names} is the policy? name it with sampler.model, which is "
                f"{self._config.model!r}"
            )
        return cards[0]

    def _exchange(self) -> Path:
        """Return the folder in which weights are handed over."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="whet-weights-", dir=exchange_folder(self._config)))
            self._folder.chmod(0o755)  # the server may be another user's
        return self._folder

    def _connect(self) -> httpx.Client:
        """Make a client that keeps as many connections as requests are under way; no proxy, no redirect."""
        key = os.environ.get(self._config.api_key_env, "")
        limits = self._httpx.Limits(max_connections=self._config.concurrency, max_keepalive_connections=None)
        return self._httpx.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=self._config.timeout_s,
            limits=limits,
            trust_env=False,
        )

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._send("POST", self._root + path, body, is_asked=False)

    def _send(
        self, method: str, url: str, body: Mapping[str, Any] | None, *, is_asked: bool = True
    ) -> dict[str, Any]:
        """Send a request, again where it fails for a passing reason, and return the answer's object.

        Every request may be repeated: a completion is a function of its seed, weights of their file.
        """
        said = ""
        for attempt in range(self._config.retries + 1):
            try:
                answer = self._client.request(method, url, json=body)
            except self._httpx.TransportError as error:
                said, asked_s = f"no answer ({str(error) or type(error).__name__})", 0.0
            else:
                if answer.status_code < 300:
                    return _object(answer, self._where, is_asked=is_asked)
                said = f"status {answer.status_code}: {answer.text[:400]!r}"
                if answer.status_code not in PASSING:
                    raise RefusedError(f"{self._where}: {said}", answer.status_code)
                given = answer.headers.get("Retry-After", "")
                asked_s = float(given) if given.isascii() and given.isdigit() else 0.0
            pause_s = max(asked_s, BACKOFF_S * 2**attempt * random.uniform(0.5, 1.5))
            if attempt < self._config.retries and self._closed.wait(min(pause_s, LONGEST_S)):
                break
        raise UserError(
            f"{self._where}: {said}, {self._config.retries + 1} times; start the server, fix the address, or raise "
            "sampler.timeout_s"
        )


def _begun(work: Callable[[], T]) -> Future[T]:
    """Begin something in a thread of its own, for which no program waits at its end."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="whet-broadcast", daemon=True).start()
    return future


def _object(answer: httpx.Response, where: str, *, is_asked: bool) -> dict[str, Any]:
    """Return an answer's JSON object; {} where none is asked for and a server says nothing, or so in plain text."""
    try:
        value = answer.json()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        if not is_asked:
            return {}
        raise UserError(f"{where}: expected a JSON object, got {answer.text[:200]!r}")
    return value


def write_weights(policy: Policy, folder: Path, *, unties: bool = False) -> None:
    """Write a policy's present weights as a Hugging Face folder, an adapter that stands beside them added to them; one
    that is trained is left out.

    Args:
        policy: The policy.
        folder: New folder.
        unties: Write a head that is tied to the embeddings once more, as a matrix of its own. vLLM's CPU build packs a
            tied head when it starts and never again (0.32: "ParallelLMHead: Failed to load weights"), so that the
            sampler drifts away from the trainer step by step.
    """
    weights = named_weights(policy, unties=unties)
    save_model(policy.model, folder, weights=weights, eos_ids=policy.stop_ids, bos_id=policy.tokenizer.bos_id)
    if unties:
        config = folder / "config.json"
        config.write_text(json.dumps(read_json(config) | {"tie_word_embeddings": False}, indent=1) + "\n")


def named_weights(policy: Policy, *, unties: bool = False) -> dict[str, torch.Tensor]:
    """Return a policy's present weights by name, an adapter that stands beside them added to them, a trained one left
    out."""
    weights: dict[str, torch.Tensor] = dict(policy.model.named_parameters())
    if policy.trained is not None:
        weights = {name: weight for name, weight in weights.items() if not name.endswith(SIDE_NAMES)}
    if policy.adapter is not None and policy.adapter.is_applied:
        weights = dict(policy.adapter.merged(policy.model))
    if unties and policy.model.config.tie_embeddings:
        weights[HEAD] = weights[EMBEDDINGS].clone()
    return {name: weight.detach() for name, weight in weights.items()}


def exchange_folder(config: SamplerConfig) -> Path | None:
    """Return the folder below which weights are handed over: the user's, or shared memory; None for the default one."""
    if config.folder:
        folder = user_path(config.folder).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else None
