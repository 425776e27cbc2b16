"""A policy: model, tokenizer and prompt protocol, loaded from and saved to one folder.

The protocol (schema, template, system prompt) travels with the weights as protocol.json, so that every stage and every
evaluation uses the same prompts.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from whet.config import user_path
from whet.generate.activations import Activations
from whet.generate.engine import Engine
from whet.generate.kernel_speed import choose_kernels
from whet.generate.sampling import SamplingParams
from whet.generate.scoring import hidden_rows, score_micro_batch
from whet.model.attention import AttentionKind
from whet.model.config import ModelConfig
from whet.model.families import RopeFactors
from whet.model.files import read_json
from whet.model.lora.adapter import Adapter
from whet.model.lora.files import find_model, find_models, named_adapters
from whet.model.lora.several import Several
from whet.model.lora.trained import Trained
from whet.model.quant import dequantize, quantize
from whet.model.routing import Routing, times_read
from whet.model.steering import Steering, read_steering
from whet.model.text.boards import boards, compose_embeddings
from whet.model.text.chat import in_user_turn, render_passages
from whet.model.text.template import BASE_STOP, BASE_TEMPLATE, PLAIN_TEMPLATE
from whet.model.text.tokenizer import Tokenizer
from whet.model.transformer import LanguageModel, LlamaLike, init_weights
from whet.model.vision.asking import flattened, images_in
from whet.model.vision.reading import read_picture
from whet.model.vision.store import ImageStore
from whet.model.weights import (
    as_reward_model,
    build_model,
    load_model,
    preprocessing_of,
    resize_vocabulary,
    save_model,
    stored_shape,
    train_tower,
)
from whet.schema import (
    BOX,
    CALLS,
    COLUMN,
    HASHES,
    MARKS,
    SCHEMAS,
    THINK,
    AnswerType,
    ResponseSchema,
    find_schema,
)
from whet.types import MicroBatch, Problem, UnreadError, UserError

INHERIT = "inherit"
TemplateName = Literal["auto", "chat", "base", "plain"]
NUM_CHECKED = 300
MAX_UNKNOWN_SHARE = 0.01
TOKENIZER_MADE = ("characters", "bytes", "boards")
EVERYWHERE = "wherever they stand"
SAMPLING_NAMES = ("temperature", "top_p", "top_k", "min_p")
"""What generation_config.json may say of sampling that whet samples by."""
GPT_OSS_CUE = "<|start|>assistant"
"""Where gpt-oss's prompts end: the model opens a channel next."""


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """The model, and how it is prompted."""

    init: str = ""
    """Run folder, Hugging Face folder, GGUF file or hub name, or a LoRA adapter that names its base; empty for random
    weights of the shape `model`."""
    adapter: str = ""
    """LoRA adapter on `init` (run that trained one, folder of the peft library, or hub name); empty for none. Several
    for whet serve, which clients choose by name: math=runs/a,code=runs/b."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Shape when the weights are random; vocab_size is set from the tokenizer."""
    tokenizer: str = ""
    """Folder or hub name; 'characters', 'bytes' or 'boards' (for chess) to create one; empty for that of `init`."""
    alphabet: str = ""
    """The alphabet of a 'characters' tokenizer."""
    tags_as_tokens: bool = False
    """Give each of the schema's tags its own token (after the existing vocabulary)."""
    padded_vocab_size: int = 0
    """Embedding rows to grow to when tags are added; 0 for just enough. Unused rows are never sampled."""
    schema: str = INHERIT
    """How a response is asked for and read: think_answer, r1, boxed, hashes, anywhere (plain chat, whose answer is read
    wherever it stands), ... or your own .yaml file; inherit takes that of `init`, else one that suits its template."""
    template: TemplateName = "auto"
    """Prompt: the model's chat template, 'base' (Question/Answer text), 'plain' (just the question); auto takes the one
    that `init` was trained with, else chat if it has one, else base."""
    tools: tuple[str, ...] = ()
    """Tools for the model to call while thinking: calculator, python (in the sandbox), or your own path.py:function;
    none for no tools if `init` has some."""
    template_values: dict[str, bool | str] = field(default_factory=dict)
    """Values that the model's chat template reads, such as enable_thinking false, beside those of `init`."""
    system_prompt: bool | str = True
    """System message: the schema's (true), none (false), or your own text (plain prompts have none)."""
    steering: tuple[str, ...] = ()
    """Steering vectors that are added while the model runs: folders of whet steer, each with its strength, such as
    calm=1.5 (1 without, negative for the contrary); none for none. Read by commands that ask a model, not by those that
    train or write one."""
    quantize: Literal["none", "nf4", "int8"] = "none"
    """Round the matrices of `init`'s layers as they are loaded: nf4 (4.13 bits a weight) or int8; whet quantize chooses
    by layer. Adapters are trained on them (--lora.rank 16), not the matrices."""
    rope_factors: RopeFactors = "auto"
    """Rotary frequencies of a model whose ropes change with length (longrope, dynamic). short: those of its original
    context, which no sequence may exceed; long: those of its whole context, for all sequences, short ones too; auto
    takes those that `init` was trained with, else short."""
    train_vision: bool = False
    """Train what turns images into embeddings, too, in a model that sees (by adapters, where the rest has adapters);
    otherwise it stays as it is, and each image is computed once."""
    max_image_tokens: int = 0
    """Tokens of an image, at most: larger ones are made smaller, with the ratio of their sides kept; 0 takes what
    `init` was trained with, else the model's own limit (16,384 of Qwen3-VL)."""
    max_rows: int = 256
    """Sequences decoded together."""
    attention: Literal["auto", "exact", "fast"] = "auto"
    """exact: sampler and trainer agree bitwise on CPU; fast: PyTorch's fused kernel; auto: exact on CPU only."""
    device: str = "auto"
    """Device such as cpu or cuda; auto takes cuda if available."""
    num_threads: int = 0
    """CPU threads; 0 leaves PyTorch's choice."""

    NAMED_BY = {"init": ("model", "tokenizer", "alphabet", "padded_vocab_size")}

    def __post_init__(self) -> None:
        if self.system_prompt in ("none", ""):
            object.__setattr__(self, "system_prompt", False)
        parse_device(self.device)
        if self.max_image_tokens < 0:
            raise ValueError(f"policy.max_image_tokens = {self.max_image_tokens}: expected 0 or more")
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
        if self.model.is_reward:
            raise ValueError("policy.model.is_reward comes from --loss reward; leave it out")
        if self.model.vocab_size != ModelConfig.vocab_size:
            raise ValueError("policy.model.vocab_size comes from the tokenizer; leave it out")
        unread = {
            "model": (not self.init, "random weights", self.model != ModelConfig()),
            "rope_factors": (self.init, "policy.init", self.rope_factors != "auto"),
            "max_image_tokens": (self.init, "policy.init", self.max_image_tokens),
            "adapter": (self.init, "policy.init, the adapter's base,", self.adapter),
            "steering": (self.init, "policy.init", self.steering),
            "quantize": (self.init, "policy.init", self.quantize != "none"),
            "alphabet": (self.tokenizer == "characters", "policy.tokenizer = characters", self.alphabet),
            "padded_vocab_size": (self.tags_as_tokens, "policy.tags_as_tokens", self.padded_vocab_size),
            "system_prompt": (
                self.template != "plain",
                "other templates than plain",
                self.system_prompt is not True,
            ),
            "template_values": (
                self.template in ("auto", "chat"),
                "the model's own chat template",
                self.template_values,
            ),
        }
        for name, (is_read, reader, is_given) in unread.items():
            if is_given and not is_read:
                raise UnreadError(f"policy.{name} is read with {reader} only; leave it out", name)


class Policy:
    """A model with its tokenizer and prompt protocol.

    Attributes:
        model: The network.
        tokenizer: Its tokenizer; the chat template in it is the protocol's.
        schema: How a response is asked for and read.
        task_schema: That of tasks with answers; another one where the policy was loaded for plain chats.
        is_plain: Whether it was loaded for plain chats, and neither config nor folder names a schema.
        is_default: Whether neither config nor folder names the schema: the template and the task decide.
        system_prompt: Whether prompts start with the schema's system message.
        attention: Attention kernel for sampling and training.
        max_rows: Sequences decoded together.
        autocast: Compute dtype of products if it is not the parameters' own.
        activations: Activations that its engines keep for `score`; None at first.
        adapter: The LoRA adapter that is applied to the model, or was merged into it; None without one.
        several: Adapters beside the model that requests choose by name (`named`); None without several.
        steering: Vectors that are added to its residual stream while it runs.
        trained: The adapters that a run trains; None where it trains the weights themselves, or nothing.
        folder: Folder of the model's weights, of an adapter its base's; None for random ones.
        replays_experts: Whether engines whose completions are trained on record the experts that tokens go to; `score`
            and `hidden` then take the same ones.
        routings: Where `score` and `hidden` put what the routers of each pass did, while a load-balancing loss is
            computed; None at other times.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        schema: ResponseSchema,
        *,
        system_prompt: bool = True,
        task_schema: ResponseSchema | None = None,
        is_default: bool = False,
        attention: AttentionKind = "exact",
        max_rows: int = 256,
        autocast: torch.dtype | None = None,
        adapter: Adapter | None = None,
        trained: Trained | None = None,
        folder: Path | None = None,
        steering: Sequence[Steering] = (),
    ) -> None:
        if tokenizer.vocab_size > model.config.vocab_size:
            raise UserError(
                f"the tokenizer has {tokenizer.vocab_size} ids, the model {model.config.vocab_size} rows: "
                "the tokenizer does not fit the model"
            )
        model.num_valid_tokens = tokenizer.vocab_size
        self.model = model
        self.tokenizer = tokenizer
        self.schema = self._given = schema
        self._is_asked = False
        self.task_schema = task_schema or schema
        self.is_plain = task_schema is not None
        self.is_default = is_default
        self.system_prompt = system_prompt
        self.attention: AttentionKind = attention
        self.max_rows = max_rows
        self.autocast = autocast
        self.activations: Activations | None = None
        self.adapter = adapter
        self.trained = trained
        self.several: Several | None = None
        self.steering = tuple(steering)
        self._named: dict[str, Policy] = {}
        self.folder = folder
        self.replays_experts = False
        self.routings: list[Routing] | None = None
        # A base model would go on with a question of its own; where the whole text counts, nothing is cut.
        is_asked = tokenizer.chat_template == BASE_TEMPLATE and schema.answer_place != "whole"
        own = (BASE_STOP,) if is_asked and not schema.stop else ()
        closings = {stop: tokenizer.encode(stop) for stop in (*schema.stop_strings, *own)}
        single = {stop: ids[0] for stop, ids in closings.items() if len(ids) == 1}
        single = {stop: index for stop, index in single.items() if index in tokenizer.special_ids}
        self.stop_ids = tuple(sorted(tokenizer.stop_ids | set(single.values())))
        self.stop_strings = tuple(stop for stop in closings if stop not in single)

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.model.head_weight.device

    def expect(self, answer_type: AnswerType, needs_gold: bool = True, is_published: bool = False) -> None:
        """Adapt the schema to a task's answers.

        The instruction names their type. Where the schema has no place for them (`none`), a chat model's answer is read
        wherever it stands; the whole text is the answer of programs, and of tasks that judge without a gold answer. A
        schema that nobody chose gives way to `none` where the task's answers do not fit into it, and a plain chat to
        `step_by_step` on a published data set: its numbers elsewhere are of models that were given an instruction.

        Args:
            answer_type: Their type.
            needs_gold: Whether the task compares them with gold answers.
            is_published: Whether the task is a published data set.

        Raises:
            UserError: If the schema has no place for such an answer.
        """
        is_whole = answer_type == "program" or not needs_gold
        given, self._is_asked = self._given, False
        if self.is_default and is_whole and given.answer_place in (*MARKS, "anywhere"):
            given = SCHEMAS["none"]
        elif self.is_default and not is_whole and _is_untaught(given) and not is_own(self.tokenizer):
            self._is_asked = is_published and not given.system
            given = replace(SCHEMAS["step_by_step" if self._is_asked else "anywhere"], system=given.system)
        place = given.answer_place
        if place == "whole" and not is_whole and not is_own(self.tokenizer):
            place = "anywhere"
        if answer_type == "program" and place in MARKS:
            raise UserError(
                f"the schema's answer place is {place}, which cannot hold a program: use --policy.schema think_answer"
            )
        self.schema = replace(given, answer_place=place, answer_type=answer_type)

    def describe_prompts(self, *, is_read_anywhere: bool = False) -> str:
        """Say in one line how problems are asked, and where their answers are read.

        Args:
            is_read_anywhere: Whether boxes, phrases and the last number count beside the schema's place.
        """
        own = {
            None: "the bare question",
            PLAIN_TEMPLATE: "the bare question",
            BASE_TEMPLATE: "Question and Answer",
        }
        template = own.get(self.tokenizer.chat_template, "the model's chat template")
        place, where = self.schema.answer_place, self.where_read()
        is_read_anywhere = is_read_anywhere or self.schema.fallback == "anywhere"
        if is_read_anywhere and place != "anywhere":
            where = EVERYWHERE if place == "whole" else f"{where}, else {EVERYWHERE}"
        on = " on a published data set" if self._is_asked else ""
        chosen = f", the default for it{on}" if self.is_default else ""
        return f"prompts: {template}, schema {self._schema_name()}{chosen}; answers are read {where}"

    def where_read(self) -> str:
        """Say where the schema has its answers."""
        schema = self.schema
        return {
            "tag": f"between {schema.answer_open} and {schema.answer_close}",
            "boxed": f"in {BOX}}}",
            "hashes": f"after {HASHES}",
            "anywhere": EVERYWHERE,
            "whole": "as a whole",
        }[schema.answer_place]

    def _schema_name(self) -> str:
        """Return the preset's name, whatever the task and the template made of it; 'of its own' without one."""
        fitted: dict[str, Any] = {"answer_type": "number", "opening_in_prompt": False}
        own = replace(self.schema, **fitted)
        return next((name for name, one in SCHEMAS.items() if replace(one, **fitted) == own), "of its own")

    def for_tasks(self) -> Policy:
        """Return the same model as tasks with answers ask it: with `task_schema`."""
        return Policy(
            self.model,
            self.tokenizer,
            self.task_schema,
            system_prompt=self.system_prompt,
            is_default=self.is_default,
            attention=self.attention,
            max_rows=self.max_rows,
            autocast=self.autocast,
            adapter=self.adapter,
            trained=self.trained,
            folder=self.folder,
            steering=self.steering,
        )

    def named(self, adapter: str) -> Policy:
        """Return the same model as one of several adapters is asked, '' being the base; `engine` serves all of them.

        Raises:
            UserError: If there is none of that name.
        """
        if adapter in self._named or not adapter:
            return self._named.get(adapter, self)
        names = ", ".join(self._named) or "none: name them as policy.adapter"
        raise UserError(f"no adapter {adapter[:80]!r} here; there are {names}")

    def _add_named(self, several: Several, prompting: Mapping[str, _Prompting]) -> None:
        """Let requests choose among adapters that stand beside the model, each asked in its own way."""
        for name, own in prompting.items():
            policy = Policy(
                self.model,
                own.tokenizer,
                own.schema,
                system_prompt=own.system_prompt,
                task_schema=own.task_schema,
                is_default=own.is_default,
                attention=self.attention,
                max_rows=self.max_rows,
                autocast=self.autocast,
                folder=self.folder,
            )
            where = several.adapters[name].folder
            if found := self.tokenizer.difference(own.tokenizer):
                raise UserError(f"{where}: its tokenizer is not the base's ({found}): load the adapter alone")
            if policy.stop_ids != self.stop_ids:
                ours, theirs = (
                    "/".join(p.tokenizer.token_text(n) for n in p.stop_ids) for p in (self, policy)
                )
                raise UserError(
                    f"{where}: its completions end at {theirs}, those of the base at {ours}: load the adapter alone"
                )
            policy.several, self._named[name] = several, policy
        self.several = several

    def chat_text(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> str:
        """Write the prompt of a conversation: the schema's instruction, the template, the generation cue, the opening
        tag if the schema has it in the prompt and the template does not write it.

        Args:
            messages: Maps with 'role' and 'content'; a system message among them replaces the schema's own.
            values: Further values, such as enable_thinking=False or tools=[...] (`Tokenizer.render`).
        """
        return self.tokenizer.plain(self._chat_text(messages, values))

    def _chat_text(self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> str:
        """Write the prompt with control tokens inside messages quoted: there they are text."""
        asked = self._asked(self.tokenizer.quoted_messages(messages))
        return self.tokenizer.render(asked, prefix=self._prefix(values), values=values)

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> tuple[int, ...]:
        """Return the tokens of `chat_text`; those of images name them (`whet.model.vision.ids`).

        Raises:
            UserError: If an image cannot be read, or the model reads text alone.
        """
        text = self._chat_text(messages, values)
        pictures = [read_picture(source) for source in images_in(messages)]
        images = self.model.images
        if images is None or not pictures:
            return tuple(self.tokenizer.encode_rendered(text))
        for picture in pictures:
            images.add(picture)
        keys = [picture.key for picture in pictures]
        expanded = images.expanded(text, keys, self.tokenizer.token_text)
        return tuple(images.named(self.tokenizer.encode_rendered(expanded), keys))

    def _asked(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        asked = self.schema.messages(messages, has_system=self.system_prompt)
        if asked and asked[0]["role"] == "system":
            role = self.tokenizer.system_role
            # Given messages are written as the template has them, which may leave them out; an instruction is not lost.
            if role == "refused" or (role == "dropped" and len(asked) > len(messages)):
                asked = in_user_turn(asked)
        sources = images_in(asked)
        if sources and self.model.images is None:
            raise UserError(
                f"the prompt has an image ({sources[0][:60]}), and the model reads text alone: take one that sees, "
                "such as Qwen/Qwen3-VL-2B-Instruct, or leave a column of images out: --task.images none"
            )
        knows_images = "image" in (self.tokenizer.chat_template or "")
        return asked if knows_images or not sources else flattened(asked, self._placeholder)

    @property
    def _placeholder(self) -> str:
        """Text that stands for an image in a prompt."""
        assert self.model.config.vision is not None
        return self.tokenizer.token_text(self.model.config.vision.token_id)

    def _prefix(self, values: Mapping[str, Any]) -> str:
        """Return the schema's opening tag, or nothing where the template has closed the thinking already."""
        prefix, closing = self.schema.generation_prefix, self.schema.think_close
        is_closed = bool(prefix) and self.tokenizer.ending(values).rstrip().endswith(closing)
        return "" if is_closed else prefix

    def response_schema(self, **values: Any) -> ResponseSchema:
        """Return how responses to `chat_text` are read: further values may have it open the thinking, or close it."""
        opened = self.schema.think_open
        ends_open = bool(opened) and self.tokenizer.ending(values).rstrip().endswith(opened)
        return replace(self.schema, opening_in_prompt=ends_open or bool(self._prefix(values)))

    def prompt_ids(self, problem: Problem) -> tuple[int, ...]:
        """Return a problem's prompt tokens, including the schema's opening tag if it is in the prompt.

        Raises:
            UserError: If the prompt is one that the chat template wrote already.
        """
        if not problem.messages:
            self.check_prompt(problem.prompt)
        return self.chat_ids([message.as_dict() for message in problem.asked])

    def check_prompt(self, prompt: str) -> None:
        """Refuse a prompt that is the text of a chat template already: it would be written twice.

        Raises:
            UserError: With what to do.
        """
        if self.tokenizer.is_rendered(prompt):
            raise UserError(
                f"the prompt {prompt.strip()[:40]!r} is in the chat template's form already, and would get it "
                "twice: give the question alone or the turns as messages, or take prompts as they are "
                "(--policy.template plain)"
            )

    @functools.cached_property
    def turn_end(self) -> int | None:
        """The token that ends the assistant's turns as the template writes them, else EOS; None without either."""
        eos = self.tokenizer.eos_id
        if is_own(self.tokenizer):
            return eos
        chat = [{"role": "user", "content": "0"}, {"role": "assistant", "content": "0"}]
        try:
            passage = render_passages(self.tokenizer, chat, stop_ids=self.stop_ids)[-1]
        except UserError:  # the template needs other messages
            return eos
        text = "".join(passage.text[slice(*span)] for span in passage.spans([1]))
        after = self.tokenizer.encode(text.rpartition("0")[2])
        return next((index for index in after if index in self.tokenizer.special_ids), eos)

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
        ids: list[int] = []
        trained: list[bool] = []
        quote = functools.partial(self.tokenizer.quoted, by_assistant=True)
        problem = replace(problem, solution=quote(problem.solution), answer=quote(problem.answer))
        for piece, is_written in self.schema.split_results(self.solution_text(problem, thinking)):
            if not is_written:
                piece = self._result(piece[len(self.schema.result_open) : -len(self.schema.result_close)])
            more = self.tokenizer.encode(piece)  # piece by piece, as an episode reads and writes them
            ids += more
            trained += [is_written] * len(more)
        end = self.turn_end
        if ids[-1] not in self.stop_ids and end is not None:
            ids, trained = [*ids, end], [*trained, True]
        return tuple(ids), () if all(trained) else tuple(trained)

    def solution_text(self, problem: Problem, thinking: str | None = None) -> str:
        """Return the text of a demonstration (`solution`) without its end."""
        if thinking is None:
            calls = problem.meta.get(CALLS) if self.schema.tools else None
            thinking = problem.solution if calls is None else self.schema.render_calls(json.loads(calls))
        column: Any = problem.meta.get(COLUMN, "")
        text = self.schema.render(thinking, problem.answer, column)
        ending = self.tokenizer.ending()
        if ending[-1:].isspace() and ending.rstrip().endswith(self.schema.generation_prefix or "\n"):
            text = text.lstrip("\n")  # the template breaks the line after its opening tag
        return text

    def check_alphabet(self, problems: Sequence[Problem], *, solutions: bool = False) -> None:
        """Refuse problems that the tokenizer cannot spell: training on unknown tokens would silently learn nothing, and
        what loses letter case or spaces on its way through the tokenizer would never be read as right.

        Args:
            problems: The problems; the first few hundred are checked.
            solutions: Whether their demonstrations are read, too.

        Raises:
            UserError: If more than 1 % of the tokens are unknown, or more than 1 % of the right answers are read as
                others, or as none, once the tokenizer has written them.
        """
        unknown, shown = self.tokenizer.unk_id, problems[:NUM_CHECKED]
        if unknown is not None:
            self._check_known(unknown, shown, solutions=solutions)
        self._check_read(shown)

    def _check_read(self, problems: Sequence[Problem]) -> None:
        """Refuse a tokenizer through which right answers do not come."""
        changed: list[tuple[str, str]] = []
        for problem in problems:
            said = self.schema.render("", problem.answer)
            back = self.tokenizer.decode_completion((0,), self.tokenizer.encode(said)).lstrip()
            answers = [self.schema.parse(text).answer for text in (said, back)]
            if len({None if answer is None else answer.strip() for answer in answers}) > 1:
                changed.append((said.strip(), back.strip()))
        if len(changed) > MAX_UNKNOWN_SHARE * len(problems):
            said, back = changed[0]
            raise UserError(
                f"the tokenizer does not keep {len(changed)} of {len(problems)} right answers: {said[-60:]!r} comes "
                f"back as {back[-60:]!r}; make tags tokens (--policy.tags-as-tokens), or use another tokenizer"
            )

    def _check_known(self, unknown: int, shown: Sequence[Problem], *, solutions: bool) -> None:
        ids = [index for problem in shown for index in self.prompt_ids(problem)]
        if solutions:
            ids += [index for problem in shown for index in self.solution(problem)[0]]
        if ids.count(unknown) > MAX_UNKNOWN_SHARE * len(ids):
            texts = [text for p in shown for text in (p.prompt, p.answer, p.solution if solutions else "")]
            letters, words = set("".join(texts)), " ".join(texts).split()
            missing = "".join(sorted(c for c in letters if unknown in self.tokenizer.encode(c)))
            missing = missing or next((w for w in words if unknown in self.tokenizer.encode(w)), "")
            raise UserError(
                f"the tokenizer does not know {missing[:40]!r}, {ids.count(unknown) / len(ids):.0%} of the "
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
            return tuple(self.tokenizer.encode(self._result(text)))
        ids = self.tokenizer.encode_next(text, prefix=self.schema.generation_prefix)
        return tuple(ids[1:] if ids[:1] == [last_id] and last_id in self.stop_ids else ids)

    def _result(self, text: str) -> str:
        """Write a tool's result: the schema's tags are removed, other control tokens are text."""
        return self.schema.render_result(self.tokenizer.quoted(self.schema.without_tags(text)))

    def completion_text(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> str:
        """Return a completion's text: exactly its tokens, without a final end of text or turn (a final tag stays)."""
        ids = list(completion_ids)
        tags = (*self.schema.tags, *self.schema.tool_tags)
        is_end = bool(ids) and (ids[-1] in self.stop_ids or ids[-1] == self.turn_end)
        if is_end and self.tokenizer.token_text(ids[-1]) not in tags:
            ids.pop()
        return self.tokenizer.decode_completion(prompt_ids, ids)

    def engine(self, *, stops: bool = True, trains: bool = False) -> Engine:
        """Create an engine for this model.

        Args:
            stops: Whether completions can stop; otherwise each has maximum length.
            trains: Keep what training on the completions needs: activations for `score`, what filters left, experts.
        """
        return Engine(
            self.model,
            stop_ids=self.stop_ids if stops else (),
            stop_strings=self.stop_strings if stops else (),
            decode=partial(self.tokenizer.decode_completion, (0,)),  # the space before a first word counts
            max_rows=self.max_rows,
            attention=self.attention,
            autocast=self.autocast,
            activations=self.activations if trains else None,
            trains=trains,
            records_experts=trains and self.replays_experts,
            several=self.several,
        )

    def routing(self, micro: MicroBatch) -> Routing | None:
        """Return what a pass over a micro-batch tells the routers of experts, and what they note; None for nothing."""
        if micro.experts_NX is None and self.routings is None:
            return None
        device = micro.tokens_N.device
        weights_N = None if self.routings is None else times_read(micro.segments, device)
        given_NX = micro.experts_NX
        if micro.split is not None:
            rows_N = micro.split.rows_N
            given_NX, weights_N = (None if x is None else x[rows_N] for x in (given_NX, weights_N))
        routing = Routing(self.model.config, given_NX=given_NX, weights_N=weights_N)
        if self.routings is not None:
            self.routings.append(routing)
        return routing

    def hidden(self, micro: MicroBatch, *, attention: AttentionKind | None = None) -> torch.Tensor:
        """Return the hidden states [M, D] that score a micro-batch's trained tokens; differentiable.

        Args:
            micro: Packed sequences.
            attention: Another attention kernel than the policy's.
        """
        return hidden_rows(
            self.model,
            micro,
            autocast=self.autocast,
            attention=attention or self.attention,
            activations=self.activations if attention is None else None,
            routing=self.routing(micro),
        )

    def score(
        self,
        micro: MicroBatch,
        *,
        temperature: float = 1.0,
        attention: AttentionKind | None = None,
        hidden_MD: torch.Tensor | None = None,
        all_rows: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Score a micro-batch's trained tokens, under the distribution that `engine` sampled.

        Args:
            micro: Packed sequences.
            temperature: Temperature at which the tokens were sampled.
            attention: Another attention kernel than the policy's.
            hidden_MD: Result of `hidden`, where it is there already.
            all_rows: Count rows of the head that are no token's, too: learning from data keeps them unlikely for
                programs that may draw them.

        Returns:
            Log-probabilities [M] and entropies [M] in nats; differentiable unless autograd is off.
        """
        return score_micro_batch(
            self.model,
            micro,
            temperature=temperature,
            autocast=self.autocast,
            attention=attention or self.attention,
            hidden_MD=self.hidden(micro, attention=attention) if hidden_MD is None else hidden_MD,
            all_rows=all_rows,
        )

    def protocol(self) -> dict[str, object]:
        """Describe the prompt protocol: part of a result's identity."""
        tokenizer = self.tokenizer
        facts: dict[str, object] = {
            "schema": self.schema.as_dict(),
            "system_prompt": self.system_prompt,
            "template": tokenizer.chat_template,
            "tokenizer": tokenizer.fingerprint,
        }
        if tokenizer.template_values:
            facts["template_values"] = tokenizer.template_values
        if "strftime_now" in (tokenizer.chat_template or ""):
            facts["date"] = tokenizer.date
        if (
            tokenizer.adds_bos and not tokenizer.prompt_bos
        ):  # earlier protocols have no such line, and the BOS
            facts["prompt_bos"] = False
        if self.model.images is not None and self.model.images.preprocessing.max_tokens:
            facts["max_image_tokens"] = self.model.images.preprocessing.max_tokens
        return facts

    def own_weights(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint holds, by name: the adapters that are trained, or all weights."""
        named = self.model.named_parameters() if self.trained is None else self.trained.named_parameters()
        return dict(named)

    def save(
        self,
        folder: Path,
        weights: Mapping[str, torch.Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write weights (given ones or the current ones), tokenizer and protocol to a loadable folder.

        Of a policy whose adapters are trained these are the adapters; an applied adapter is merged into what is
        written, in float32.

        Args:
            folder: The folder.
            weights: Weights in place of the model's own.
            dtype: Dtype of what is written; default: the weights' own.
        """
        if self.steering:
            raise UserError("a steered model cannot be written: load it without policy.steering")
        self.save_protocol(folder)
        if self.trained is not None:
            self.trained.write(folder, weights)
            return
        if self.adapter is not None and self.adapter.is_applied:
            assert weights is None
            weights = self.adapter.merged(self.model)
        # transformers scores a text before its padding: an id that also ends texts would move that place.
        pad_id = None if self.tokenizer.pad_id in self.stop_ids else self.tokenizer.pad_id
        ends = {"bos_id": self.tokenizer.bos_id, "eos_ids": self.stop_ids, "pad_id": pad_id}
        save_model(self.model, folder, weights=weights, dtype=dtype, **ends)

    def save_protocol(self, folder: Path) -> None:
        """Write only tokenizer and protocol: enough to display completions without the weights."""
        self.tokenizer.save(folder)
        facts = self.protocol()
        if self.is_plain:
            del facts["schema"]  # nobody chose it: what comes next takes its own default, as from a hub model
        elif self.is_default:
            facts["is_default"] = True  # chats are asked as it was trained; each task by its own rule
        (folder / "protocol.json").write_text(json.dumps(facts, indent=1) + "\n")


def written_date(folder: Path) -> str:
    """Return the date that a run's prompts were written with, for a resume on another day; '' before its first
    checkpoint, or if its template has none."""
    saved = sorted(folder.glob("checkpoints/[!.]*/protocol.json"))  # no half-written one in a hidden folder
    path = next((path for path in (folder / "protocol.json", *saved) if path.is_file()), None)
    date = read_json(path).get("date", "") if path is not None else ""
    return date if isinstance(date, str) else ""


def parse_device(name: str) -> torch.device | None:
    """Return the device that a name means, available or not; None for 'auto'.

    Raises:
        UserError: If whet does not run on such a device.
    """
    if name == "auto":
        return None
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UserError(f"policy.device = {name!r}: expected auto, cpu, cuda or cuda:N")
    return device


def resolve_device(name: str) -> torch.device:
    """Resolve 'auto' or a device name to an available device.

    Raises:
        UserError: If it is not available.
    """
    device = parse_device(name) or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"policy.device = {name!r}: this machine has no usable CUDA device; use cpu or auto")
    if device.type == "cuda" and device.index is not None:
        if device.index >= torch.cuda.device_count():
            raise UserError(
                f"policy.device = {name!r}: this machine's GPUs are cuda:0 to cuda:{torch.cuda.device_count() - 1}"
            )
        torch.cuda.set_device(device)  # Triton launches on the current device
    return device


def load_policy(
    config: PolicyConfig,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    merge: bool = False,
    plain: bool = False,
    date: str = "",
    is_reward: bool = False,
    weights: bool = True,
    several: bool = False,
    steers: bool = False,
    shard: Callable[..., None] | None = None,
) -> Policy:
    """Load or create model, tokenizer and protocol. An adapter's tokenizer and protocol take precedence over its
    base's.

    Args:
        config: What to load.
        seed: Seed of random weights and of new vocabulary rows.
        dtype: Parameter dtype.
        autocast: Compute dtype of products if it differs.
        merge: Merge an adapter into the weights, to train them; otherwise it is applied, frozen, and can be switched
            off (`policy.adapter.off`).
        plain: Ask a model that comes without a protocol, where the config names no schema either, as its template
            alone has it: chats, servers and preference pairs. Tasks with answers ask by a schema.
        date: Today for the chat template, as YYYY-MM-DD; empty for that of the folder's protocol, else the computer's.
        is_reward: Make it a reward model, where it is none.
        weights: False for the prompts alone: the model has its shape and no memory.
        several: Take adapters by name (`Policy.named`), where the config names them: the caller chooses one for each
            request.
        steers: Take steering vectors, where the config names them: the caller asks the model, and neither trains nor
            writes it.
        shard: Deals a model without memory out over the ranks (called with the model, and `device`); each rank then
            reads its own rows. Not used, and the model is returned whole, where it is not what a folder has: adapters
            that stand beside it already, added vocabulary, a new head, matrices in few bits.

    Returns:
        The policy, on its device.

    Raises:
        UserError: If something is missing, malformed or inconsistent.
    """
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    if config.steering and not steers:
        raise UserError(
            "policy.steering is read by commands that ask a model (chat, serve, eval, compare, infer, trace); this one "
            "would lose it: leave it out"
        )
    device = resolve_device(config.device)
    folder, adapter, adapters = None, None, dict[str, Adapter]()
    names = named_adapters(config.adapter) if several else {}
    if len(names) > 1 or (names and not user_path(config.adapter).exists() and "=" in config.adapter):
        folder, adapters = find_models(config.init, names, weights=weights)
        if config.tags_as_tokens:
            raise UserError(
                "policy.tags_as_tokens grows the vocabulary, which several adapters share; leave it out"
            )
    elif config.init:
        folder, adapter = find_model(config.init, config.adapter, weights=weights)
    own = _prompting(config, folder, adapter, plain=plain, date=date)
    tokenizer = own.tokenizer
    if not weights:
        rows = max(tokenizer.vocab_size, config.padded_vocab_size)
        shape = config.model if folder is None else stored_shape(folder)
        if folder is not None and not config.tags_as_tokens:
            rows = shape.vocab_size
        with torch.device("meta"):
            model = build_model(replace(shape, vocab_size=max(rows, shape.vocab_size * (folder is not None))))
        if folder is not None and shape.vision is not None:  # which says how many tokens an image has
            model.images = ImageStore(preprocessing_of(folder, shape.vision))
    elif folder is None:
        shape = replace(config.model, vocab_size=max(tokenizer.vocab_size, config.padded_vocab_size))
        model = build_model(shape)
        init_weights(model, seed)
        if config.tokenizer == "boards" and isinstance(model, LlamaLike):
            compose_embeddings(model.model.embed_tokens.weight, tokenizer, seed)
        model = model.to(device=device, dtype=dtype)
    else:
        kinds: dict[str, Any] = {"dtype": dtype, "device": device, "rope_factors": config.rope_factors}
        # An adapter stands on what it was trained on; merged, it is added to that, dense, and their sum is rounded.
        beside = adapter or next(iter(adapters.values()), None)
        rounded = "none" if beside is None else beside.quantize
        if rounded == "none" and (adapter is None or not merge):
            rounded = config.quantize
        elif not merge and config.quantize not in ("none", rounded):
            raise UserError(
                f"policy.quantize = {config.quantize}: the adapter was trained beside {rounded} matrices; leave it out"
            )
        kind = None if rounded == "none" else rounded
        if shard is not None and adapter is None and not config.tags_as_tokens and not is_reward:
            kinds["shard"] = partial(shard, device=device)
        model, _ = load_model(folder, is_reward=None if is_reward else False, quantize=kind, **kinds)
        if adapter is not None:
            if merge:
                dequantize(model, dtype)
            model = adapter.fit(model)
            if merge:
                print(f"whet: {adapter.folder} is merged: {adapter.merge(model)}", flush=True)
            if merge and config.quantize != "none":
                quantize(model, config.quantize)
        if config.tags_as_tokens:
            model = resize_vocabulary(model, max(tokenizer.vocab_size, config.padded_vocab_size), seed).to(
                device
            )
        if adapter is not None and not merge:
            adapter.fit(model)  # the vocabulary may have grown
            adapter.apply(model)
    if config.train_vision:
        train_tower(model)
    if own.max_image_tokens:
        if model.images is None:
            raise UserError(
                f"policy.max_image_tokens = {own.max_image_tokens}: the model reads text alone; leave it out"
            )
        model.images = ImageStore(model.images.preprocessing.limited(own.max_image_tokens))
    if is_reward:
        model = as_reward_model(model)
    if weights:
        choose_kernels(model.config, model.head_weight.dtype, device)
    steering = read_steering(config.steering)
    for vectors in steering:
        vectors.check(model.config)
        if weights:
            vectors.apply(model)
    policy = Policy(
        model,
        tokenizer,
        own.schema,
        system_prompt=own.system_prompt,
        task_schema=own.task_schema,
        is_default=own.is_default,
        attention=_attention(config, device),
        max_rows=config.max_rows,
        autocast=autocast,
        adapter=adapter,
        folder=folder,
        steering=steering,
    )
    if adapters:
        beside = Several(adapters)
        beside.apply(model)
        each = {n: _prompting(config, folder, a, plain=plain, date=date) for n, a in adapters.items()}
        policy._add_named(beside, each)  # pyright: ignore[reportPrivateUsage]
    return policy


@dataclass(frozen=True, slots=True)
class _Prompting:
    """How a model is asked.

    Attributes:
        tokenizer: Its tokenizer, with the template.
        schema: How a response is asked for and read.
        task_schema: That of tasks with answers, where it is another one.
        is_default: Whether neither config nor folder names it; a folder may hold the default of its training.
        system_prompt: Whether prompts start with the schema's system message.
        max_image_tokens: Tokens of an image, at most; 0 for the model's own limit.
    """

    tokenizer: Tokenizer
    schema: ResponseSchema
    task_schema: ResponseSchema | None
    is_default: bool
    system_prompt: bool
    max_image_tokens: int


def _prompting(
    config: PolicyConfig, folder: Path | None, adapter: Adapter | None, *, plain: bool, date: str
) -> _Prompting:
    """Load how a model is asked, an adapter's files before its base's."""
    stored = _stored(_home(folder, adapter, "protocol.json"))
    chosen = _chosen_schema(config, stored)
    tokenizer = _tokenizer(config, folder, adapter, _tags(config, chosen or SCHEMAS["think_answer"]))
    tokenizer = _with_template(config, stored, tokenizer, date)
    # Tags that become tokens are wanted, whatever the template.
    default = SCHEMAS["think_answer"] if config.tags_as_tokens else _default_schema(tokenizer)
    task_schema = _finished(config, chosen or default, tokenizer)
    schema = task_schema
    is_plain = plain and chosen is None and not config.tags_as_tokens
    if is_plain:
        schema = _finished(config, _plain_schema(tokenizer), tokenizer)
    if (tags := _tags(config, task_schema)) and config.tokenizer not in TOKENIZER_MADE:
        tokenizer = tokenizer.with_tags(tags, padded_vocab_size=config.padded_vocab_size or None)
    if 0 < config.padded_vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"policy.padded_vocab_size = {config.padded_vocab_size}: the tokenizer has {tokenizer.vocab_size} ids"
        )
    return _Prompting(
        tokenizer,
        schema,
        task_schema if is_plain else None,
        chosen is None or (config.schema == INHERIT and stored is not None and stored.is_default),
        _has_system(config, stored, tokenizer),
        config.max_image_tokens or (stored.max_image_tokens if stored is not None else 0),
    )


def _home(folder: Path | None, adapter: Adapter | None, name: str) -> Path | None:
    """Return the folder of a file: the adapter's if it has the file, else the base's."""
    return adapter.folder if adapter is not None and (adapter.folder / name).is_file() else folder


def _attention(config: PolicyConfig, device: torch.device) -> AttentionKind:
    if config.attention == "auto":
        return "exact" if device.type == "cpu" else "fast"
    return config.attention


@dataclass(frozen=True, slots=True)
class _Stored:
    """The contents of a protocol.json."""

    schema: ResponseSchema | None
    template: str
    system_prompt: bool
    template_values: dict[str, bool | str]
    date: str
    prompt_bos: bool
    max_image_tokens: int
    is_default: bool


def _stored(folder: Path | None) -> _Stored | None:
    """Read a folder's protocol; None where it has none, as a model from a hub."""
    if folder is None or not (folder / "protocol.json").is_file():
        return None
    facts = read_json(folder / "protocol.json")
    try:
        schema = facts.get("schema")  # absent where nobody chose one
        values = facts.get("template_values", {})
        stored = _Stored(
            None if schema is None else ResponseSchema(**schema),
            facts["template"],
            facts["system_prompt"],
            values,
            facts.get("date", ""),
            facts.get("prompt_bos", True),
            facts.get("max_image_tokens", 0),
            facts.get("is_default") is True,
        )
        if not isinstance(stored.template, str) or not isinstance(stored.system_prompt, bool):
            raise TypeError("template must be text, system_prompt true or false")
        if not all(isinstance(value, bool | str) for value in values.values()):
            raise TypeError("template_values must be texts, true or false")
        if not isinstance(stored.max_image_tokens, int) or stored.max_image_tokens < 0:
            raise TypeError("max_image_tokens must be a number from 0")
        if stored.date:
            datetime.date.fromisoformat(stored.date)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder}/protocol.json: malformed ({error})") from None
    return stored


def _chosen_schema(config: PolicyConfig, stored: _Stored | None) -> ResponseSchema | None:
    """Return the schema that the config or the folder names; None where neither does."""
    if config.schema != INHERIT:
        return find_schema(config.schema)
    return stored.schema if stored is not None else None


UNTAUGHT = ("anywhere", "step_by_step", "none")
"""Schemas of models that were never trained to one, by task: own rows, published data sets, programs."""


def _default_schema(tokenizer: Tokenizer) -> ResponseSchema:
    """Return the schema of tasks with answers for a model that comes without a protocol, by its template's cue."""
    ending = "" if is_own(tokenizer) else tokenizer.ending().rstrip()
    if ending.endswith(THINK):  # opened, or closed without a word
        return SCHEMAS["r1" if ending.endswith(THINK[0]) else "boxed"]
    if ending.endswith(GPT_OSS_CUE):
        return SCHEMAS["gpt_oss"]
    # Measured with SmolLM2-135M-Instruct on 100 word problems, greedily, at most 56 and 120 tokens: asked as its
    # template alone asks 24 are right; asked for a box 18, at greater length and none in a box; asked for tags 6 of 50.
    has_thinking = is_own(tokenizer) or THINK[1] in (tokenizer.chat_template or "")
    return SCHEMAS["think_answer" if has_thinking else "anywhere"]


def _is_untaught(schema: ResponseSchema) -> bool:
    """Say whether a default is one that a chat model gets which knows no format."""
    places = {(SCHEMAS[name].answer_place, SCHEMAS[name].fallback) for name in UNTAUGHT}
    return not schema.tags and not schema.tools and (schema.answer_place, schema.fallback) in places


def _plain_schema(tokenizer: Tokenizer) -> ResponseSchema:
    """Return the schema of plain chats: nothing is appended; thinking is told apart where the template has it."""
    if not is_own(tokenizer) and tokenizer.ending().rstrip().endswith(GPT_OSS_CUE):
        return replace(SCHEMAS["gpt_oss"], instruction="")
    schema = SCHEMAS["none"]
    if THINK[1] in (tokenizer.chat_template or ""):
        return replace(schema, think_open=THINK[0], think_close=THINK[1], opening_in_prompt=False)
    return schema


def is_own(tokenizer: Tokenizer) -> bool:
    """Say whether the template is one of whet's own, for models without one: question and answer, no conversation."""
    return tokenizer.chat_template in (None, BASE_TEMPLATE, PLAIN_TEMPLATE)


def own_sampling(policy: Policy, *, is_chat: bool = True) -> SamplingParams:
    """Return how a model's makers want it sampled (generation_config.json); else a chat is cooler than the model is.

    Texts to be continued, and a model without a chat template of its own, are drawn from as they are.
    """
    given = policy.model.sampling_defaults
    if given.get("do_sample") is False:
        return SamplingParams(temperature=0.0)
    named = {name: given[name] for name in SAMPLING_NAMES if name in given}
    with suppress(ValueError, TypeError):  # a file written by hand
        if named:
            return SamplingParams(**named)
    if is_chat and not is_own(policy.tokenizer):
        return SamplingParams(temperature=0.7, top_p=0.95)
    return SamplingParams()


def written_sampling(policy: Policy) -> dict[str, Any]:
    """Return what generation_config.json is to say of sampling, so that other programs sample as `whet chat` does.

    What the model's makers say stays as it is. Where they say nothing, all of `own_sampling` is written: transformers
    would else keep to the 50 likeliest tokens.
    """
    given = policy.model.sampling_defaults
    own = own_sampling(policy)
    if given.get("do_sample") is False or any(name in given for name in SAMPLING_NAMES):
        return given
    return {"do_sample": True} | {name: getattr(own, name) for name in SAMPLING_NAMES[:3]} | given


def _finished(config: PolicyConfig, schema: ResponseSchema, tokenizer: Tokenizer) -> ResponseSchema:
    """Give a schema the config's tools and system message, and fit it to what the template opens itself."""
    if config.tools:
        schema = replace(schema, tools=() if config.tools == ("none",) else config.tools)
    if isinstance(config.system_prompt, str):
        instruction = "" if schema.instruction_in == "system" else schema.instruction
        schema = replace(schema, system=config.system_prompt, instruction=instruction)
    if is_own(tokenizer):
        return schema
    ending = tokenizer.ending().rstrip()
    if ending.endswith(GPT_OSS_CUE) and schema.opening_in_prompt:
        raise UserError(
            f"policy.schema: {schema.think_open} cannot stand in the prompt, because the model opens a channel there: "
            "use --policy.schema gpt_oss, boxed, hashes or none"
        )
    if ending.endswith(THINK[1]) and schema.opening_in_prompt:
        raise UserError(
            f"policy.schema: {schema.think_open} opens the thinking, but the model's template has closed it already "
            f"({THINK[0]} {THINK[1]}): use --policy.schema boxed, hashes or none, or --policy.template-values "
            "enable_thinking true"
        )
    if not ending.endswith(THINK[0]):
        return schema
    if schema.think_open not in ("", THINK[0]):
        raise UserError(
            f"policy.schema: thinking is {schema.think_open}, but the model's template opens it with {THINK[0]}: use "
            "--policy.schema r1 or think_answer, or --policy.template base"
        )
    return replace(schema, think_open=THINK[0], think_close=THINK[1], opening_in_prompt=True)


def _tags(config: PolicyConfig, schema: ResponseSchema) -> tuple[str, ...]:
    """Return the tags that become tokens."""
    if config.tools:
        schema = replace(schema, tools=() if config.tools == ("none",) else config.tools)
    return (*schema.tags, *schema.tool_tags) if config.tags_as_tokens else ()


def _with_template(
    config: PolicyConfig, stored: _Stored | None, tokenizer: Tokenizer, date: str
) -> Tokenizer:
    """Give a tokenizer the template that prompts are written with."""
    name, given = config.template, config.template_values
    if name == "auto" and stored is not None:
        values = stored.template_values | given
        date = date or stored.date
        return tokenizer.with_template(
            stored.template, values=values, date=date, prompt_bos=stored.prompt_bos
        )
    if name == "chat" and tokenizer.chat_template is None:
        raise UserError("policy.template = chat: the tokenizer has no chat template; use base, plain or auto")
    template = tokenizer.chat_template
    if name == "base" or template is None:
        template = BASE_TEMPLATE
    if name == "plain":
        template = PLAIN_TEMPLATE
    return tokenizer.with_template(template, values=given, date=date)


def _has_system(config: PolicyConfig, stored: _Stored | None, tokenizer: Tokenizer) -> bool:
    """Say whether prompts have the schema's system message."""
    if isinstance(config.system_prompt, str):
        if tokenizer.chat_template == PLAIN_TEMPLATE:
            raise UserError("policy.system_prompt: this model's prompt is the bare question; leave it out")
        return True
    is_stored = stored is None or config.template != "auto" or stored.system_prompt
    return config.system_prompt and is_stored and tokenizer.chat_template != PLAIN_TEMPLATE


def _tokenizer(
    config: PolicyConfig, folder: Path | None, adapter: Adapter | None, tags: Sequence[str]
) -> Tokenizer:
    """Load the tokenizer, or create it with the tags."""
    if config.tokenizer == "characters":
        return Tokenizer.characters(config.alphabet, tags)
    if config.tokenizer == "bytes":
        return Tokenizer.bytes(tags)
    if config.tokenizer == "boards":
        return boards(tags)
    home = _home(folder, adapter, "tokenizer.json")
    tokenizer = Tokenizer.load(config.tokenizer or str(home))
    if not config.tokenizer and home != folder and folder and (folder / "tokenizer.json").is_file():
        base = Tokenizer.load(folder)  # stop tokens are often defined only in the base's folder
        tokenizer.stop_ids |= {n for n in base.stop_ids if base.token_text(n) == tokenizer.token_text(n)}
    return tokenizer
