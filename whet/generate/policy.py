"""A policy: model, tokenizer and prompt protocol, loaded from and saved to one folder.

The protocol (schema, template, system prompt) travels with the weights as protocol.json, so that every stage and every
evaluation uses the same prompts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from whet.generate.activations import Activations
from whet.generate.engine import Engine
from whet.generate.kernel_speed import choose_kernels
from whet.generate.scoring import score_micro_batch
from whet.model.attention import AttentionKind
from whet.model.config import ModelConfig
from whet.model.files import read_json
from whet.model.lora.adapter import Adapter
from whet.model.lora.files import find_model
from whet.model.text.template import BASE_TEMPLATE, PLAIN_TEMPLATE
from whet.model.text.tokenizer import Tokenizer
from whet.model.transformer import LanguageModel, init_weights
from whet.model.weights import build_model, load_model, resize_vocabulary, save_model
from whet.schema import CALLS, SCHEMAS, AnswerType, ResponseSchema
from whet.types import MicroBatch, Problem, UserError

SchemaName = Literal["inherit", "think_answer", "reasoning_answer", "working_out_solution"]
TemplateName = Literal["auto", "chat", "base", "plain"]
NUM_CHECKED = 300
MAX_UNKNOWN_SHARE = 0.01
TOKENIZER_MADE = ("characters", "bytes")


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """The model, and how it is prompted."""

    init: str = ""
    """Run folder, Hugging Face folder or hub name, or a LoRA adapter that names its base; empty for random weights of
    the shape `model`."""
    adapter: str = ""
    """LoRA adapter (folder of the peft library, or hub name) to merge into `init`; empty for none."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Shape when the weights are random; vocab_size is set from the tokenizer."""
    tokenizer: str = ""
    """Folder or hub name; 'characters' or 'bytes' to create one; empty for that of `init`."""
    alphabet: str = ""
    """The alphabet of a 'characters' tokenizer."""
    tags_as_tokens: bool = False
    """Give each of the schema's tags its own token (after the existing vocabulary)."""
    padded_vocab_size: int = 0
    """Embedding rows to grow to when tags are added; 0 for just enough. Unused rows are never sampled."""
    schema: SchemaName = "inherit"
    """Tags of a response; inherit takes that of `init`, or think_answer."""
    template: TemplateName = "auto"
    """Prompt: the model's chat template, 'base' (Question/Answer text), 'plain' (just the question); auto takes the one
    that `init` was trained with, else chat if it has one, else base."""
    tools: tuple[str, ...] = ()
    """Tools for the model to call while thinking: calculator, python (in the sandbox), or your own path.py:function;
    none for no tools if `init` has some."""
    system_prompt: bool = True
    """Start with the schema's instruction (plain prompts have none)."""
    max_rows: int = 256
    """Sequences decoded together."""
    attention: Literal["auto", "exact", "fast"] = "auto"
    """exact: sampler and trainer agree bitwise on CPU; fast: PyTorch's fused kernel; auto: exact on CPU only."""
    device: str = "auto"
    """Device such as cpu or cuda; auto takes cuda if available."""
    num_threads: int = 0
    """CPU threads; 0 leaves PyTorch's choice."""

    def __post_init__(self) -> None:
        if self.max_rows < 1:
            raise ValueError(f"policy.max_rows = {self.max_rows}: expected 1 or more")
        if self.num_threads < 0:
            raise ValueError(
                f"policy.num_threads = {self.num_threads}: expected 0 (PyTorch's choice) or more"
            )
        if not self.init and not self.tokenizer:
            raise ValueError(
                "policy.init is empty (random weights): give policy.tokenizer, such as bytes or a folder"
            )
        if self.tokenizer == "characters" and not self.alphabet:
            raise ValueError("policy.tokenizer = characters needs policy.alphabet")
        if self.model.vocab_size != ModelConfig.vocab_size:
            raise ValueError("policy.model.vocab_size comes from the tokenizer; leave it out")
        unread = {
            "model": (not self.init, "random weights", self.model != ModelConfig()),
            "adapter": (self.init, "policy.init, the adapter's base,", self.adapter),
            "alphabet": (self.tokenizer == "characters", "policy.tokenizer = characters", self.alphabet),
            "padded_vocab_size": (self.tags_as_tokens, "policy.tags_as_tokens", self.padded_vocab_size),
            "system_prompt": (self.template != "plain", "other templates than plain", not self.system_prompt),
        }
        for name, (is_read, reader, is_given) in unread.items():
            if is_given and not is_read:
                raise ValueError(f"policy.{name} is read with {reader} only; leave it out")


class Policy:
    """A model with its tokenizer and prompt protocol.

    Attributes:
        model: The network.
        tokenizer: Its tokenizer; the chat template in it is the protocol's.
        schema: Tags and answer type of a response.
        system_prompt: Whether prompts start with the schema's instruction.
        attention: Attention kernel for sampling and training.
        max_rows: Sequences decoded together.
        autocast: Compute dtype of products if it is not the parameters' own.
        activations: Activations that its engines keep for `score`; None at first.
        adapter: The LoRA adapter that was merged into the model, or is applied to it; None without one.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        schema: ResponseSchema,
        *,
        system_prompt: bool = True,
        attention: AttentionKind = "exact",
        max_rows: int = 256,
        autocast: torch.dtype | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        if tokenizer.vocab_size > model.config.vocab_size:
            raise UserError(
                f"the tokenizer has {tokenizer.vocab_size} ids, the model {model.config.vocab_size} rows: "
                "the tokenizer does not fit the model"
            )
        model.num_valid_tokens = tokenizer.vocab_size
        self.model = model
        self.tokenizer = tokenizer
        self.schema = schema
        self.system_prompt = system_prompt
        self.attention: AttentionKind = attention
        self.max_rows = max_rows
        self.autocast = autocast
        self.activations: Activations | None = None
        self.adapter = adapter
        closings = {stop: tokenizer.encode(stop) for stop in schema.stop_strings}
        single = {stop: ids[0] for stop, ids in closings.items() if len(ids) == 1}
        single = {stop: index for stop, index in single.items() if index in tokenizer.special_ids}
        self.stop_ids = tuple(sorted(tokenizer.stop_ids | set(single.values())))
        self.stop_strings = tuple(stop for stop in schema.stop_strings if stop not in single)

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.model.head_weight.device

    def expect(self, answer_type: AnswerType) -> None:
        """Adapt the instruction to a task's type of answer."""
        self.schema = replace(self.schema, answer_type=answer_type)

    def prompt_ids(self, problem: Problem) -> tuple[int, ...]:
        """Return a problem's prompt tokens, including the schema's opening tag if it is in the prompt."""
        messages = [message.as_dict() for message in problem.messages]
        messages = messages or [{"role": "user", "content": problem.prompt}]
        if self.system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.schema.system_prompt}, *messages]
        return tuple(self.tokenizer.encode_prompt(messages, prefix=self.schema.generation_prefix))

    def solution(
        self, problem: Problem, *, thinking: str | None = None
    ) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Return the tokens of a demonstration: thinking, answer and the end of the response.

        Args:
            problem: Problem with its worked solution.
            thinking: Another thinking text, such as '' for an empty scratch-pad; default: the calls that solve it if
                the schema has tools and the problem lists them, else the solution.

        Returns:
            The tokens, and True for those that the model writes; empty if it writes all.
        """
        if thinking is None:
            calls = problem.meta.get(CALLS) if self.schema.tools else None
            thinking = problem.solution if calls is None else self.schema.render_calls(json.loads(calls))
        text = self.schema.render(thinking, problem.answer)
        ids: list[int] = []
        trained: list[bool] = []
        for piece, is_written in self.schema.split_results(text):
            more = self.tokenizer.encode(piece)  # piece by piece, as an episode reads and writes them
            ids += more
            trained += [is_written] * len(more)
        end = self.tokenizer.eos_id
        if ids[-1] not in self.stop_ids and end is not None:
            ids, trained = [*ids, end], [*trained, True]
        return tuple(ids), () if all(trained) else tuple(trained)

    def check_alphabet(self, problems: Sequence[Problem], *, solutions: bool = False) -> None:
        """Refuse problems that the tokenizer cannot spell: training on unknown tokens would silently learn nothing.

        Args:
            problems: The problems; the first few hundred are checked.
            solutions: Whether their demonstrations are read, too.

        Raises:
            UserError: If more than 1 % of the tokens are unknown.
        """
        unknown, shown = self.tokenizer.unk_id, problems[:NUM_CHECKED]
        if unknown is None:
            return
        ids = [index for problem in shown for index in self.prompt_ids(problem)]
        if solutions:
            ids += [index for problem in shown for index in self.solution(problem)[0]]
        if ids.count(unknown) > MAX_UNKNOWN_SHARE * len(ids):
            text = "".join(p.prompt + p.answer + (p.solution if solutions else "") for p in shown)
            missing = sorted(c for c in set(text) if unknown in self.tokenizer.encode(c))
            raise UserError(
                f"the tokenizer does not know {''.join(missing)[:40]!r}, {ids.count(unknown) / len(ids):.0%} of the "
                "problems' tokens: give it another policy.alphabet, or use another tokenizer"
            )

    def observation_ids(self, text: str, last_id: int, *, inline: bool) -> tuple[int, ...]:
        """Return the tokens of an environment's answer.

        Args:
            text: The answer.
            last_id: The last token that the policy wrote; an end-of-message token is not written twice.
            inline: True inside the policy's own message (a tool's result, tagged), False for a user message, with the
                tokens that close the policy's message before it and open the next one after it.
        """
        if inline:
            return tuple(self.tokenizer.encode(self.schema.render_result(text)))
        ids = self.tokenizer.encode_next(text, prefix=self.schema.generation_prefix)
        return tuple(ids[1:] if ids[:1] == [last_id] and last_id in self.stop_ids else ids)

    def completion_text(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> str:
        """Return a completion's text: exactly its tokens, without a final end-of-text token (a final tag stays)."""
        ids = list(completion_ids)
        tags = (*self.schema.tags, *self.schema.tool_tags)
        if ids and ids[-1] in self.stop_ids and self.tokenizer.token_text(ids[-1]) not in tags:
            ids.pop()
        return self.tokenizer.decode_completion(prompt_ids, ids)

    def engine(self, *, stops: bool = True, keeps: bool = False) -> Engine:
        """Create an engine for this model.

        Args:
            stops: Whether completions can stop; otherwise each has maximum length.
            keeps: Keep activations for `score`.
        """
        return Engine(
            self.model,
            stop_ids=self.stop_ids if stops else (),
            stop_strings=self.stop_strings if stops else (),
            decode=partial(self.tokenizer.decode_completion, (0,)),  # the space before a first word counts
            max_rows=self.max_rows,
            attention=self.attention,
            autocast=self.autocast,
            activations=self.activations if keeps else None,
        )

    def score(
        self, micro: MicroBatch, *, temperature: float = 1.0, attention: AttentionKind | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Score a micro-batch's trained tokens, under the distribution that `engine` sampled.

        Args:
            micro: Packed sequences.
            temperature: Temperature at which the tokens were sampled.
            attention: Another attention kernel than the policy's.

        Returns:
            Log-probabilities [M] and entropies [M] in nats; differentiable unless autograd is off.
        """
        return score_micro_batch(
            self.model,
            micro,
            temperature=temperature,
            autocast=self.autocast,
            attention=attention or self.attention,
            activations=self.activations if attention is None else None,
        )

    def protocol(self) -> dict[str, object]:
        """Describe the prompt protocol: part of a result's identity."""
        return {
            "schema": asdict(self.schema) | {"tools": list(self.schema.tools)},
            "system_prompt": self.system_prompt,
            "template": self.tokenizer.chat_template,
            "tokenizer": self.tokenizer.fingerprint,
        }

    def save(
        self,
        folder: Path,
        weights: Mapping[str, torch.Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write weights (given ones or the current ones), tokenizer and protocol to a loadable folder.

        Args:
            folder: The folder.
            weights: Weights in place of the model's own.
            dtype: Dtype of what is written; default: the weights' own.
        """
        assert self.adapter is None or not self.adapter.is_applied, "an applied adapter would be left out"
        self.save_protocol(folder)
        ids = {"bos_id": self.tokenizer.bos_id, "eos_ids": self.stop_ids}
        save_model(self.model, folder, weights=weights, dtype=dtype, **ids)

    def save_protocol(self, folder: Path) -> None:
        """Write only tokenizer and protocol: enough to display completions without the weights."""
        self.tokenizer.save(folder)
        (folder / "protocol.json").write_text(json.dumps(self.protocol(), indent=1) + "\n")


def resolve_device(name: str) -> torch.device:
    """Resolve 'auto' or a device name to an available device.

    Raises:
        UserError: If it is not available.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"policy.device = {name!r}: expected auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"policy.device = {name!r}: this machine has no usable CUDA device; use cpu or auto")
    return device


def load_policy(
    config: PolicyConfig,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    merge: bool = True,
) -> Policy:
    """Load or create model, tokenizer and protocol. An adapter's tokenizer and protocol take precedence over its
    base's.

    Args:
        config: What to load.
        seed: Seed of random weights and of new vocabulary rows.
        dtype: Parameter dtype.
        autocast: Compute dtype of products if it differs.
        merge: Merge an adapter; False applies it, so that it can be switched off (`policy.adapter.off`).

    Returns:
        The policy, on its device.

    Raises:
        UserError: If something is missing, malformed or inconsistent.
    """
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    device = resolve_device(config.device)
    folder, adapter = find_model(config.init, config.adapter) if config.init else (None, None)
    schema, template, system_prompt = _protocol(config, _home(folder, adapter, "protocol.json"))
    tokenizer = _tokenizer(config, folder, adapter, schema)
    name = config.template
    if name == "chat" and tokenizer.chat_template is None:
        raise UserError("policy.template = chat: the tokenizer has no chat template; use base, plain or auto")
    if template is None and (name == "base" or (name == "auto" and tokenizer.chat_template is None)):
        template = BASE_TEMPLATE
    elif template is None and name == "plain":
        template = PLAIN_TEMPLATE
    if template is not None:
        tokenizer = tokenizer.with_template(template)
    if 0 < config.padded_vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"policy.padded_vocab_size = {config.padded_vocab_size}: the tokenizer has {tokenizer.vocab_size} ids"
        )
    if folder is None:
        shape = replace(config.model, vocab_size=max(tokenizer.vocab_size, config.padded_vocab_size))
        model = build_model(shape)
        init_weights(model, seed)
        model = model.to(device=device, dtype=dtype)
    else:
        model, _ = load_model(folder, dtype=dtype, device=device)
        if adapter is not None:
            model = adapter.fit(model)
            if merge:
                adapter.merge(model)
        if config.tags_as_tokens:
            model = resize_vocabulary(model, max(tokenizer.vocab_size, config.padded_vocab_size), seed).to(
                device
            )
        if adapter is not None and not merge:
            adapter.fit(model)  # the vocabulary may have grown
            adapter.apply(model)
    choose_kernels(model.config, model.head_weight.dtype, device)
    has_system = system_prompt and tokenizer.chat_template != PLAIN_TEMPLATE
    return Policy(
        model,
        tokenizer,
        schema,
        system_prompt=has_system,
        attention=_attention(config, device),
        max_rows=config.max_rows,
        autocast=autocast,
        adapter=adapter,
    )


def _home(folder: Path | None, adapter: Adapter | None, name: str) -> Path | None:
    """Return the folder of a file: the adapter's if it has the file, else the base's."""
    return adapter.folder if adapter is not None and (adapter.folder / name).is_file() else folder


def _attention(config: PolicyConfig, device: torch.device) -> AttentionKind:
    if config.attention == "auto":
        return "exact" if device.type == "cpu" else "fast"
    return config.attention


def _protocol(config: PolicyConfig, folder: Path | None) -> tuple[ResponseSchema, str | None, bool]:
    """Return schema, template text (None: not fixed yet) and whether there is a system prompt."""
    stored = None
    if folder is not None and (folder / "protocol.json").is_file():
        stored = read_json(folder / "protocol.json")
    schema = SCHEMAS["think_answer" if config.schema == "inherit" else config.schema]
    template, system_prompt = None, config.system_prompt
    if stored is not None:
        try:
            if config.schema == "inherit":
                schema = ResponseSchema(**stored["schema"])
            if config.template == "auto":
                template, stored_prompt = stored["template"], stored["system_prompt"]
                if not isinstance(template, str) or not isinstance(stored_prompt, bool):
                    raise TypeError("template must be text, system_prompt true or false")
                system_prompt = stored_prompt and config.system_prompt
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{folder}/protocol.json: malformed ({error})") from None
    if config.tools:
        schema = replace(schema, tools=() if config.tools == ("none",) else config.tools)
    return schema, template, system_prompt


def _tokenizer(
    config: PolicyConfig, folder: Path | None, adapter: Adapter | None, schema: ResponseSchema
) -> Tokenizer:
    tags = (*schema.tags, *schema.tool_tags) if config.tags_as_tokens else ()
    if config.tokenizer == "characters":
        return Tokenizer.characters(config.alphabet, tags)
    if config.tokenizer == "bytes":
        return Tokenizer.bytes(tags)
    home = _home(folder, adapter, "tokenizer.json")
    tokenizer = Tokenizer.load(config.tokenizer or str(home))
    if not config.tokenizer and home != folder and folder and (folder / "tokenizer.json").is_file():
        base = Tokenizer.load(folder)  # stop tokens are often defined only in the base's folder
        tokenizer.stop_ids |= {n for n in base.stop_ids if base.token_text(n) == tokenizer.token_text(n)}
    rows = config.padded_vocab_size or None
    return tokenizer.with_tags(tags, padded_vocab_size=rows) if tags else tokenizer
