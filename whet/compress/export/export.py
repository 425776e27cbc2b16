"""`whet export RUN --to KIND --out DIR`: a model for other programs, and a report of what they answer with it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from whet.cli import Program
from whet.compress.export import gguf, kquants, parity, runtimes
from whet.compress.export import importance as importances
from whet.compress.export.kquants import K_TYPES
from whet.compress.export.prompt import modelfile, unlike_ollama, whole_template
from whet.compress.export.vocabulary import Vocabulary, express
from whet.config import cache_folder, counted, temporary_folder
from whet.eval.evaluate import take_problems
from whet.generate.policy import (
    SAMPLING_NAMES,
    Policy,
    PolicyConfig,
    load_policy,
    own_sampling,
    written_sampling,
)
from whet.install import install_command
from whet.kernels.cpu.ops import forget
from whet.model.families import from_hf
from whet.model.files import read_json
from whet.model.gguf import File, read_back
from whet.model.lora.adapter import CONFIG, WEIGHTS, Adapter
from whet.model.lora.files import BASE, find_model
from whet.model.quant import dequantize, packed_parts
from whet.model.text.tokenizer import Tokenizer
from whet.model.weights import load_model, without_rows
from whet.storage.commit import new_folder
from whet.storage.folder import next_line
from whet.tasks.base import TaskConfig, load_task, task_of
from whet.types import UserError

Kind = Literal["hf", "merged", "adapter", "gguf", "ollama", "mlx"]
Type = Literal["auto", "f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_k_s", "q3_k_m", "q2_k"]
NO_MODEL = "MODEL"
REPORT, PROTOCOL = "export_report.json", "protocol.json"
LORA = "adapter.gguf"
"""An adapter for llama.cpp's --lora, beside peft's files."""
TORCH_TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
MLX_WINDOWS = frozenset({"gemma3_text", "gemma4_text", "ministral3", "olmo3"})
"""Families whose layers have windows in mlx-lm, too."""
DEFAULTS: dict[Kind, Type] = {"hf": "bf16", "merged": "bf16", "mlx": "bf16", "gguf": "q8_0", "ollama": "q8_0"}
DEFAULTS["adapter"] = "f32"
RUNTIMES: dict[Kind, str] = {"hf": "transformers", "merged": "transformers", "adapter": "peft", "mlx": "mlx"}
RUNTIMES |= {"gguf": "llama.cpp", "ollama": "llama.cpp"}
"""What checks each kind."""
PROMPTS = (
    "What is 7 + 5?",
    "12+30=",
    "Once upon a time, there was",
    "Write one sentence about rain.",
    "Name three colours.",
    "What is the capital of France?",
    "Why is the sky blue?",
    "3 * 4 - 2",
    "Lily and Tom went to the park",
    "Hello!",
    "List the first five prime numbers.",
    "If a train covers 60 km in 45 minutes, what is its speed in km/h?",
    "def add(a, b):",
    "Translate 'good morning' into German.",
    "A big dog",
    "Éa, naïve café: 10 € — déjà vu?",
)
"""Questions without a task; those that the tokenizer cannot spell are left out."""


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Write a model for other programs, and check it there."""

    policy: PolicyConfig = field(default_factory=lambda: PolicyConfig(init=NO_MODEL, device="cpu"))
    """The model: run folder, Hugging Face folder, hub name, or an adapter."""
    to: Kind = "hf"
    """hf: a folder for transformers and vLLM; merged: the same with the adapter in the weights; adapter: peft's folder;
    gguf: one file for llama.cpp; ollama: that with a Modelfile; mlx: a folder for mlx-lm."""
    out: str = ""
    """New folder."""
    dtype: Type = "auto"
    """Type of the weights; auto: bf16 for hf, merged and mlx, q8_0 for gguf and ollama. Below 8 bits the extra llama is
    needed."""
    imatrix: str = ""
    """For types below 8 bits, which inputs matter: a file of llama.cpp's llama-imatrix in GGUF, or auto: measured on
    training problems of the report's task with the model's own answers (without a task, on the report's prompts)."""
    task: str = ""
    """Task, file or hub name whose test problems are the report's prompts; empty for those of the run's own task, else
    sixteen of whet's."""
    num_prompts: int = 16
    """Prompts of the report."""
    max_new_tokens: int = 32
    """Longest greedy text of the report in tokens."""

    def __post_init__(self) -> None:
        if self.policy.init == NO_MODEL and not Path(NO_MODEL).exists():
            raise ValueError(
                "no model: name a run folder, a Hugging Face folder or a hub name after the command"
            )
        if not self.out:
            raise ValueError("out is empty: name a new folder, as in --out exported")
        for name in ("num_prompts", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: expected 1 or more")
        is_gguf = self.to in ("gguf", "ollama")
        if not is_gguf and self.dtype not in ("auto", *TORCH_TYPES):
            raise ValueError(f"dtype = {self.dtype}: --to {self.to} takes {', '.join(TORCH_TYPES)}")
        if self.to == "adapter" and self.dtype not in ("auto", "f32"):
            raise ValueError(f"dtype = {self.dtype}: an adapter is stored in f32")
        if self.imatrix not in ("", "auto") and not Path(self.imatrix).is_file():
            raise ValueError(
                f"imatrix = {self.imatrix}: no such file; expected one of llama-imatrix, or auto"
            )
        if self.imatrix and self.dtype not in K_TYPES:
            raise ValueError(
                f"imatrix is read with types below 8 bits only, such as q4_k_m; got {self.dtype}"
            )

    @property
    def type(self) -> Type:
        """The type that is written."""
        return DEFAULTS[self.to] if self.dtype == "auto" else self.dtype


def main(config: ExportConfig) -> None:
    """Write the export and its report, and print the verdict.

    Raises:
        UserError: If the model cannot be expressed, or a tool that was asked for is missing; nothing is left.
        SystemExit: With status 1 if the artefact answers otherwise than the model.
    """
    report = export(config, lambda text: print(f"whet: export: {text}", flush=True))
    print("\n".join(lines(report)), flush=True)
    if report["verdict"] == "failed":
        raise SystemExit(1)
    print(next_steps(config))


def plan(config: ExportConfig) -> str:
    """Say what would check the export."""
    runtime = RUNTIMES[config.to]
    absent = runtimes.missing(runtime)
    how = f"NOT CHECKED: {absent} is not installed: {install_command(runtimes.EXTRAS[runtime])}"
    return f"{config.to} {config.type} in {config.out}; the report: " + (how if absent else f"by {runtime}")


def check(config: ExportConfig, resume: bool) -> None:
    """Find what an export would stop at, for --dry-run; create nothing.

    Raises:
        UserError: As the export would.
    """
    del resume
    refuse(config)
    print("checked: model, folder, tools; it would start")


def refuse(config: ExportConfig) -> None:
    """Refuse, before a weight is read, what an export would stop at in the end.

    Raises:
        UserError: If the folder exists, or an adapter, a package, a tool, or a place in GGUF for something of the model
            is missing.
    """
    out = Path(config.out)
    if out.exists():
        raise UserError(f"{out}: exists already; name another folder with --out")
    is_gguf = config.to in ("gguf", "ollama")
    if is_gguf:
        gguf.import_gguf()
    if config.type in K_TYPES:
        kquants.refuse(config.type)
    if config.imatrix not in ("", "auto"):
        importances.read(Path(config.imatrix))
    base, adapter = find_model(config.policy.init, config.policy.adapter, weights=False)
    if config.to == "merged" and adapter is None:
        raise UserError(
            f"{config.policy.init}: no adapter to merge (merged before?); use --to hf, or --policy.adapter FOLDER"
        )
    if config.to == "adapter" and adapter is None:
        raise UserError(f"{config.policy.init}: no adapter in it; use --to hf for the whole model")
    if not is_gguf:
        return
    shape = from_hf(read_json(base / "config.json"), where=str(base / "config.json"))
    gguf.architecture(shape)
    gguf.metadata(shape)
    homes = [base] if adapter is None else [adapter.folder, base]
    home = next((home for home in homes if (home / "tokenizer.json").is_file()), None)
    if home is not None and not config.policy.tokenizer:
        tokenizer = Tokenizer.load(home)
        express(tokenizer, min(tokenizer.vocab_size, shape.vocab_size), tuple(tokenizer.stop_ids))


Tell = Callable[[str], object]


def export(config: ExportConfig, tell: Tell = lambda _: None) -> dict[str, Any]:
    """Write the export and its report; return the report.

    Args:
        config: What is exported, and how.
        tell: Called with what is done next, which may take minutes.

    Raises:
        UserError: If the model cannot be expressed, or a tool that was asked for is missing; nothing is left.
    """
    refuse(config)
    out = Path(config.out)
    # Plain: a model without a protocol of whet's leaves as its own template asks it.
    policy = load_policy(config.policy, seed=0, merge=False, plain=True)
    adapter, vocabulary = policy.adapter, None
    policy.model.sampling_defaults = written_sampling(policy)
    if config.to in ("gguf", "ollama"):
        if adapter is None:  # whose layers have names of their own
            gguf.check_names(policy.model)
        vocabulary = express(policy.tokenizer, policy.model.num_valid_tokens, policy.stop_ids)
    if config.imatrix:
        tell("which inputs of each matrix matter")
    importance = _importance(config, policy)
    chats = prompts(config, policy)
    source = own_tokenizer(config.policy, policy.tokenizer.date)
    tell(f"the model itself answers {counted(len(chats), 'prompt')}, for the report")
    reference = parity.take(policy, chats, config.max_new_tokens, source)
    forget(policy.model.parameters())  # the kernels' copies of weights that change now are as large as they
    lost: dict[str, float] = {}
    notes: list[str] = []
    if packed_parts(policy.model) and config.to in ("gguf", "ollama") and config.type not in K_TYPES:
        notes.append(
            f"its matrices in few bits are written in {config.type}; --dtype q4_k_m makes a smaller file"
        )
    if config.to != "adapter":
        if adapter is not None:
            adapter.remove(policy.model)
        dequantize(policy.model, torch.float32)
        if adapter is not None:
            lost = merge(policy, adapter, TORCH_TYPES.get(config.type))
    if config.to in ("hf", "merged", "mlx") and (mass := _tokenless(reference, policy)) > parity.TOKENLESS:
        num_rows = policy.tokenizer.vocab_size
        left = policy.model.config.vocab_size - num_rows
        policy.model = without_rows(policy.model, num_rows)
        notes.append(
            f"{left:,} rows of the vocabulary that are no token's are left out: they had {mass:.1%} of the "
            "probability, and other programs would draw them"
        )
    with new_folder(out) as folder:
        report = _written(config, policy, reference, vocabulary, importance, folder, tell)
        report["notes"] = [*notes, *report["notes"]]
        report |= {"adapter": "" if adapter is None else str(adapter.folder), "cast": lost}
        (folder / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def _tokenless(reference: parity.Reference, policy: Policy) -> float:
    """Return the mean probability of rows that are no token's where all rows count, as in other programs."""
    masses = [parity.mass_beyond(logits, policy.tokenizer.vocab_size) for logits in reference.logits]
    return float(np.concatenate(masses).mean())


NUM_CALIBRATION = 64
"""Prompts of a measured importance."""


def _importance(config: ExportConfig, policy: Policy) -> importances.Importance | None:
    """Measure or read which inputs of each matrix matter; None if that is not asked for."""
    if not config.imatrix:
        return None
    if config.imatrix == "auto":
        chats = prompts(config, policy, split="train", count=NUM_CALIBRATION)
        return importances.measure(policy, [policy.chat_ids(chat) for chat in chats], config.max_new_tokens)
    return importances.read(Path(config.imatrix))


def prompts(
    config: ExportConfig, policy: Policy, *, split: str = "test", count: int | None = None
) -> list[parity.Chat]:
    """Return the conversations of the report, each a question that fits the context and the tokenizer.

    Args:
        config: Names the task; without one, and for a run without one, they are whet's own questions.
        policy: Its tokenizer and context count.
        split: Split of the task that is taken if it has problems.
        count: How many; default: the report's.

    Raises:
        UserError: If there is none.
    """
    task = TaskConfig(name=config.task) if config.task else task_of(config.policy.init)
    texts: list[parity.Chat] = []
    if task is not None:
        loaded = load_task(task)
        count = config.num_prompts if count is None else count
        others = ("test", "train") if split == "test" else ("train", "test")
        problems = list(take_problems(loaded, others[0], count))
        if not problems or (split == "test" and len(problems) < count):
            # Own data's test split may have two rows, of which one near tie would be half of the report.
            problems += take_problems(loaded, others[1], count - len(problems) if count else 0)
        for problem in problems:
            said = [{"role": m.role, "content": str(m.content)} for m in problem.messages]
            texts.append(said or [{"role": "user", "content": problem.prompt}])
    else:
        texts = [[{"role": "user", "content": text}] for text in PROMPTS[: config.num_prompts]]
    room = policy.model.config.max_positions - config.max_new_tokens
    unknown = policy.tokenizer.unk_id
    ids = [policy.chat_ids(chat) for chat in texts]
    kept = [
        chat
        for chat, row in zip(texts, ids, strict=True)
        if 0 < len(row) <= room and (unknown is None or unknown not in row)
    ]
    if not kept:
        raise UserError(
            f"none of {len(texts)} prompts fits the context of {policy.model.config.max_positions} tokens and the "
            "tokenizer: give the model's own task with --task, or lower --max-new-tokens"
        )
    return kept


def merge(policy: Policy, adapter: Adapter, dtype: torch.dtype | None) -> dict[str, float]:
    """Merge a removed adapter in float32; return what a cast to the type loses of its change.

    Args:
        policy: The policy; its model is changed.
        adapter: Its adapter.
        dtype: Type that will be written; None for a quantised one, which is compared as a whole.
    """
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    adapter.merge(policy.model)
    policy.adapter = None
    total = kept = error = changed = same = 0.0
    for name, parameter in policy.model.named_parameters():
        delta = parameter.detach() - before[name]
        moved = delta != 0
        if dtype is None or not moved.any():
            continue
        cast = parameter.detach().to(dtype).float() - before[name].to(dtype).float()
        total += float(delta.square().sum())
        kept += float((cast * delta).sum())
        error += float((cast - delta).square().sum())
        changed += float(moved.sum())
        same += float((moved & (cast == 0)).sum())
    if not changed:
        return {}
    return {
        "change_norm": total**0.5,
        "error_of_change": (error / total) ** 0.5,
        "weights_unmoved": same / changed,
    }


def own_tokenizer(config: PolicyConfig, date: str) -> Tokenizer | None:
    """Return the tokenizer of a model's own files, with their chat template; None where it is asked otherwise.

    It is asked otherwise where protocol.json names a schema, as of a run that trained on a task, or the config says so.

    Args:
        config: The model.
        date: Today for the template, as YYYY-MM-DD.
    """
    default = PolicyConfig(init=config.init)
    names = ("tokenizer", "tags_as_tokens", "schema", "template", "tools", "template_values", "system_prompt")
    if any(getattr(config, name) != getattr(default, name) for name in names):
        return None
    base, adapter = find_model(config.init, config.adapter)
    homes = [base] if adapter is None else [adapter.folder, base]
    stored = next((home / PROTOCOL for home in homes if (home / PROTOCOL).is_file()), None)
    facts = {} if stored is None else read_json(stored)
    if facts.get("schema") is not None or facts.get("template_values"):
        return None
    found = Tokenizer.load(next((home for home in homes if (home / "tokenizer.json").is_file()), base))
    prompt_bos = None if stored is None else bool(facts.get("prompt_bos", True))
    return found.with_template(found.chat_template, date=date, prompt_bos=prompt_bos)


def _written(
    config: ExportConfig,
    policy: Policy,
    reference: parity.Reference,
    vocabulary: Vocabulary | None,
    importance: importances.Importance | None,
    out: Path,
    tell: Tell,
) -> dict[str, Any]:
    """Write the artefact, and compare it with the reference; `vocabulary` is that of a GGUF file."""
    template, notes = whole_template(policy) if reference.has_template else "", []
    unlike: list[str] = []  # what Ollama would ask otherwise
    kind = config.type
    base, dtype, runtime, artefact = "", "float32", RUNTIMES[config.to], out
    tell(f"writing {config.to} in {kind}")
    if vocabulary is not None:
        artefact = out / "model.gguf"
        notes += _write_gguf(config, policy, artefact, vocabulary.with_template(template), importance)
        if config.to == "ollama":
            more, unlike = _write_modelfile(policy, out, reference)
            notes += more
    elif config.to == "adapter":
        base, adapter = _write_adapter(config, policy, out, template), policy.adapter
        assert adapter is not None
        if Path(adapter.base or base).parent in (
            home() / "gguf" for home in (cache_folder, temporary_folder)
        ):
            notes.append(
                f"the base that the adapter names is {adapter.base or base}, made of a GGUF file on this machine: copy "
                "it, too, or write one model with --to merged"
            )
        try:
            gguf.write_lora(adapter, policy.model, out / LORA)
        except UserError as error:
            notes.append(f"no {LORA} for llama.cpp: {error}")
    else:
        policy.save(out, dtype=TORCH_TYPES[kind])
        _write_template(out, template)
        dtype = str(TORCH_TYPES[kind]).removeprefix("torch.")
        if config.to == "mlx":
            window = min((spec.window for spec in policy.model.config.layers if spec.window), default=0)
            if window and gguf.model_type(policy.model.config) not in MLX_WINDOWS:
                notes.append(
                    f"mlx-lm has no windows for this family: it answers otherwise beyond {window:,} tokens"
                )
    context = gguf.context_length(policy.model.config) if runtime == "llama.cpp" else 0
    longest = max(map(len, reference.prompts)) + config.max_new_tokens
    if packed_parts(policy.model):  # of an adapter alone: other exports are dense
        asked = {"not_checked": "its base is in few bits, and peft would put a dense one below it"}
    else:
        if not runtimes.missing(runtime):
            tell(f"{runtime} answers the same prompts")
        asked = parity.ask(
            policy,
            reference,
            runtime,
            artefact.resolve(),
            base=base,
            dtype=dtype,
            context=min(context, longest + 8),
        )
    tell("what was written is read again, and answers, too")
    again = parity.stored(_read_again(config, policy, artefact), reference)
    is_checked = "not_checked" not in asked
    limits = parity.THRESHOLDS.get(kind, parity.LOOSE)
    shape = policy.model.config
    if runtime == "llama.cpp" and (shape.family == "gpt2" or shape.block.activation == "gelu_tanh"):
        limits = replace(limits, kl=max(limits.kl, parity.GELU_KL))
    found = asked if is_checked else again
    if kind != "f32" and parity.failures(again, limits):
        notes.append(
            f"rounding the weights to {kind} alone changes more than is usual (KL {again['kl']:.2g} in our own engine, "
            f"{limits.kl:g} is usual): a type of more bits answers as the model does"
        )
        limits = limits.eased(again)
    wrong = parity.failures(found, limits)
    wrong += unlike
    if lines_unlike := asked.get("lines_unlike"):
        notes.append(
            f"llama.cpp's tokens are others on {len(lines_unlike)} of {len(parity.LINES)} hard lines, such as "
            f"{lines_unlike[0][:30]!r}"
        )
    verdict = "failed" if wrong else ("passed" if is_checked else "not checked")
    # What whet reads of its own files cannot show a wrong key, template or tokenizer: it answers for none of these.
    main = {name: found[name] if is_checked else None for name in ("top1_agreement", "kl", "greedy_equal")}
    return {
        "verdict": verdict,
        "failures": wrong,
        **main,
        "checked_by": asked["runtime"] if is_checked else None,
        "runtime": asked,
        "stored": again,
        "thresholds": {"kl": limits.kl, "top1_agreement": limits.top1, "greedy_equal": limits.greedy},
        "to": config.to,
        "dtype": kind,
        "model": config.policy.init,
        "num_prompts": len(reference.prompts),
        "max_new_tokens": config.max_new_tokens,
        "bytes": sum(path.stat().st_size for path in out.rglob("*") if path.is_file()),
        "notes": notes,
    }


def _write_gguf(
    config: ExportConfig,
    policy: Policy,
    path: Path,
    vocabulary: Vocabulary,
    importance: importances.Importance | None,
) -> list[str]:
    """Write model.gguf; return notes."""
    shape, kind = policy.model.config, config.type
    notes = list(vocabulary.notes)
    if gguf.context_length(shape) < shape.max_positions:
        notes.append(
            f"llama.cpp has no windows for this family: the context is cut to {gguf.context_length(shape)}"
        )
    name = Path(config.policy.init).name
    if importance is not None:
        shapes = {label: tensor.shape for label, tensor in gguf.tensors(policy.model)}
        importances.check(importance, shapes, config.imatrix)
    gguf.write_gguf(policy.model, vocabulary, path, kind, name=name, importance=importance)
    if kind not in K_TYPES:
        return notes
    types = File(path).types()
    notes.append("matrices by type: " + ", ".join(f"{count} {name}" for name, count in types.items()))
    if odd := sum(count for name, count in types.items() if not name.endswith("_K")):
        notes.append(
            f"{odd} of {sum(types.values())} matrices have rows that blocks of 256 do not fill: they got another type, "
            "as in llama.cpp"
        )
    return notes


def _write_modelfile(policy: Policy, out: Path, reference: parity.Reference) -> tuple[list[str], list[str]]:
    """Write the Modelfile; return notes, and what Ollama asks otherwise with it."""
    context, has_template = gguf.context_length(policy.model.config), reference.has_template
    # All of them: Ollama has values of its own for what is left out, and `whet chat` would sample otherwise.
    sampling = {name: float(getattr(own_sampling(policy), name)) for name in SAMPLING_NAMES}
    sampling["repeat_penalty"] = float(policy.model.sampling_defaults.get("repetition_penalty", 1.0))
    text, notes = modelfile(policy, "model.gguf", context, sampling, has_template=has_template)
    (out / "Modelfile").write_text(text, encoding="utf-8")
    return notes, unlike_ollama(policy, text, reference.chats) if has_template else []


def _write_adapter(config: ExportConfig, policy: Policy, out: Path, template: str) -> str:
    """Write peft's folder; return its base."""
    adapter = policy.adapter
    assert adapter is not None
    base = str(_base(config).resolve())
    shutil.copyfile(adapter.folder / WEIGHTS, out / WEIGHTS)
    settings = json.loads((adapter.folder / CONFIG).read_text(encoding="utf-8"))
    settings["base_model_name_or_path"] = adapter.base or base
    (out / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    if (noted := adapter.folder / BASE).is_file():
        facts = json.loads(noted.read_text(encoding="utf-8")) | {
            "relative": os.path.relpath(base, out.resolve())
        }
        (out / BASE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    policy.save_protocol(out)
    _write_template(out, template)
    return base


def _write_template(out: Path, template: str) -> None:
    """Write the chat template for other programs; '' for none."""
    path = out / "chat_template.jinja"
    path.write_text(template, encoding="utf-8") if template else path.unlink(missing_ok=True)


def _base(config: ExportConfig) -> Path:
    """Return the folder of the model that the adapter stands on."""
    return find_model(config.policy.init, config.policy.adapter)[0]


def _read_again(config: ExportConfig, policy: Policy, artefact: Path) -> Policy:
    """Return the policy with the weights that were stored."""
    if config.to not in ("gguf", "ollama"):
        policy.model.to("meta")  # its answers are in the reference, and two models would be in memory
    if config.to == "adapter":
        settings = replace(config.policy, init=str(_base(config)), adapter=str(artefact))
        return load_policy(settings, seed=0, merge=False, plain=True)
    if config.to in ("gguf", "ollama"):
        model = policy.model  # its own weights are in the reference: a copy would double the memory
        with torch.no_grad():
            for name, stored in read_back(artefact, model):
                model.get_parameter(name).copy_(stored)
    else:
        model, _ = load_model(artefact)
    return Policy(
        model.eval(),
        policy.tokenizer,
        policy.schema,
        system_prompt=policy.system_prompt,
        attention=policy.attention,
        max_rows=policy.max_rows,
    )


def lines(report: Mapping[str, Any]) -> list[str]:
    """Return what is printed of a report."""
    asked, stored = report["runtime"], report["stored"]
    head = f"{report['to']} {report['dtype']}, {report['bytes']:,} bytes; {counted(report['num_prompts'], 'prompt')}"
    if "not_checked" in asked:
        rows = [
            f"{head}, NOT CHECKED in the program that it is for: {asked['not_checked']}",
            "  what that answers is not known: a wrong key, template or token shows only there; once it is installed, "
            "the same command with another --out writes the model again and checks it",
            f"  rounding alone, in whet's own engine: KL {stored['kl']:.2e} nats a token, same top token "
            f"{stored['top1_agreement']:.1%}",
        ]
    else:
        near = ""
        if asked["greedy_equal_to_ties"] > report["greedy_equal"]:
            near = f" ({asked['greedy_equal_to_ties']:.1%} up to near ties: tokens within {parity.NEAR_TIE} nats)"
        rows = [
            f"{head}, checked by {report['checked_by']}",
            f"  KL {report['kl']:.2e} nats a token, same top token {report['top1_agreement']:.1%}, equal greedy text "
            f"{report['greedy_equal']:.1%}" + near,
            f"  rounding alone: KL {stored['kl']:.2e}; same prompt tokens {asked['prompts_equal']:.1%}, same stops "
            f"{asked['stops_equal']:.1%}",
        ]
    if report["cast"]:
        share = report["cast"]["error_of_change"]
        size = f"lost {share:.1%} of" if share < 1 else f"has an error {share:.1f} times as large as"
        rows.append(
            f"  the cast {size} the adapter's change; "
            f"{report['cast']['weights_unmoved']:.1%} of the changed weights did not move (--dtype f32 keeps all of it)"
        )
    rows += [f"  note: {note}" for note in report["notes"]]
    rows += [f"  FAILED: {line}" for line in report["failures"]]
    return [*rows, f"verdict: {report['verdict']}"]


def next_steps(config: ExportConfig) -> str:
    """Say what one does with an export; the commands can be pasted."""
    out = shlex.quote(config.out)
    name = shlex.quote(re.sub(r"[^a-z0-9_.-]", "-", Path(config.out).resolve().name.lower()))
    file, recipe = (shlex.quote(str(Path(config.out) / part)) for part in ("model.gguf", "Modelfile"))
    steps = {
        "hf": (f"whet serve {out}", f"vllm serve {out}"),
        "merged": (f"whet serve {out}", f"vllm serve {out}"),
        "adapter": (f"whet serve {out}",),
        "gguf": (f"whet chat {file}", f"llama-cli -m {file}"),
        "ollama": (f"whet chat {file}", f"ollama create {name} -f {recipe} && ollama run {name}"),
        "mlx": (f"whet serve {out}", f"mlx_lm.generate --model {out} --prompt 'Who are you?'"),
    }
    return next_line(*map(_noted, steps[config.to]))


def _noted(command: str) -> str:
    """Add to a command of another program that it is not on this machine; as a comment, so that it can be pasted."""
    program = command.split(" ", 1)[0]
    return (
        command
        if program == "whet" or shutil.which(program)
        else f"{command}   # {program} is not installed here"
    )


PROGRAM = Program(config_class=ExportConfig, main=main, plan=plan, check=check, positional="policy.init")
