r"""Change one line of whet at a time and see whether its tests notice.

    python tests/mutants.py [--only PATTERN] [--jobs N] [--list]

A mutant is a row of the table below: a fragment of one line, what takes its place, and the tests that must fail then.
Each runs in a temporary copy of whet/ and tests/; the checkout is never written to. The tests are run once on the
unchanged copy first, since a test that fails anyway catches nothing.

Prints caught, SURVIVED or stale (the fragment does not stand in the file exactly once) for each, and their share. Exit
status 1 when a row is stale, when less than 95 % are caught, or when a survivor is a mask, a denominator or a sign:
those train a model on the wrong thing without any error. Run by hand and once a week: about 20 minutes on one core.
`tests/test_architecture.py` checks with every run of the tests that no row is stale.

Mutants that cannot be told from the original are left out. Among those that were tried:
- `train/objective/advantage.py`, GDPO's whitening without `- mean`: each reward's z-scores add up to 0 in every group,
  so the mean of their sums is 0.
- The same file, `_paid_early` without `[:-1]`: the last turn's reward is taken from and given to the last token.
- `eval/compare/paired.py`, `difference = a - b`: only its spread and number are used; the sign comes from
  `paired_interval(a, b)`, which has a row. `2**i <= num_samples`: the last k is written twice with one value.
- `rewards/answers/structure.py`, brackets that do not fit: `_top_level` has found that none of them embraces the text.
- `stats.py`, Wilson's lower end without its case for 0: centre and half width are the same number there. `t_tails`
  without its case for one degree of freedom: the sum there is multiplied by 0.
- `model/quant.py`, int8 without the guard for rows of zeros: 0 / 0 becomes code 0, as with it.
- `algo/signal.py` and `algo/advantages.py`: masks of what a later mask sets to 0.
- `generate/cache.py`, rows moved without the position at which their last token will be read: nothing is there yet.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "whet"
TIMEOUT_S = 180.0
WANTED_SHARE = 0.95
NEVER_SURVIVES = ("mask", "denominator", "sign")
KINDS = (*NEVER_SURVIVES, "bound", "guard", "factor", "choice", "order")
"""mask: what counts; denominator: what is divided by; bound: limits and constants; guard: a case that is looked after;
factor: what is multiplied or added; choice: which of several values; order: places and positions."""
OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--tb=line", "--timeout=0", "--ci")
# What is preloaded is not rewritten; of warnings that would fail a test anyway, this one is our own doing.
OPTIONS += ("-W", "ignore::pytest.PytestAssertRewriteWarning")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One changed line.

    Attributes:
        kind: One of `KINDS`.
        file: Path below whet/.
        old: Fragment of one line, which stands in the file exactly once.
        new: What takes its place.
        tests: Arguments of pytest.
    """

    kind: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        """What a person reads, and what --only looks at."""
        return f"{self.file} {self.kind}: {self.old.strip()} -> {self.new.strip()}"


Row = tuple[str, str, str] | tuple[str, str, str, tuple[str, ...]]
"""Kind, old, new; tests of its own, where those of the file are not the ones."""
DEFINITION = "tests/train/test_invariance.py::test_the_step_is_the_definition_however_it_is_cut"
TEACHER = ("tests/train/test_teacher.py",)
OBJECTIVE = "tests/train/test_objective.py"
STATS = "tests/test_stats.py"


def cases(*names: str) -> tuple[str, ...]:
    """Rows of the invariance matrix: a step with whet against its definition on padded rows."""
    return tuple(f"{DEFINITION}[{name}-float64]" for name in names)


QUANTISING = "tests/compress/test_quantize.py"
EXPORTING = "tests/compress/test_export.py"
PACKING = "tests/model/test_quant.py"
FAMILIES = "tests/model/test_families.py"
FAMILY = f"{FAMILIES}::test_a_family"
GRADIENTS = f"{FAMILIES}::test_gradients_are_those_of_transformers"
SESSION = "tests/train/test_session.py"
REINFORCING = "tests/train/test_rl.py"
CHECKPOINTS = "tests/storage/test_checkpoint.py"
EDITING = "tests/editing/test_linear_memory.py"
SERVING = "tests/serve/test_scheduler.py"
ENGINE = "tests/generate/test_engine.py"
TABLE: dict[tuple[str, tuple[str, ...]], list[Row]] = {
    ("editing/memory.py", ("tests/editing/test_linear_memory.py",)): [
        ("factor", "solve(weight * moment_FF.double()", "solve(moment_FF.double()"),
        ("denominator", "residual_D.double()[:, None] / scale", "residual_D.double()[:, None]"),
        ("mask", "free = vectors_FF[:, is_free_F]", "free = vectors_FF[:, ~is_free_F]"),
        ("bound", "is_free_F = values_F.cumsum(0) <= share", "is_free_F = values_F.cumsum(0) >= share"),
    ],
    ("editing/methods.py", ("tests/editing/test_memit_oracle.py",)): [
        ("denominator", "missing_ED / (len(memories) - place)", "missing_ED / len(memories)"),
        ("factor", "before.double().t() @ before.double() / weight", "before.double().t() @ before.double()"),
        ("order", "view(len(facts), count, -1).mean(1)", "view(count, len(facts), -1).mean(0)"),
    ],
    ("editing/targets.py", ("tests/editing/test_memit_oracle.py",)): [
        ("denominator", "(second[keep] / (1 - 0.999**step)).sqrt()", "second[keep].sqrt()"),
        ("denominator", "1 / (len(contexts.texts) * len(whole.targets))", "1 / len(contexts.texts)"),
        ("sign", "-chosen * self._weights.to(chosen.dtype)", "chosen * self._weights.to(chosen.dtype)"),
        ("factor", "loss = nll + settings.kl * kl + decay", "loss = nll + kl + decay"),
        ("choice", "essence, 0.0) - torch.where", "essence, 0.0) + torch.where"),
    ],
    ("editing/statistics.py", ("tests/editing/test_memit_oracle.py",)): [
        ("mask", "real = keys_NF[:count].double()", "real = keys_NF.double()"),
        ("denominator", "found[layer] = total / tokens", "found[layer] = total / len(windows)"),
    ],
    ("editing/editor.py", ("tests/editing/test_edit_and_train.py",)): [
        ("choice", "pairs.count((True, False)), pairs.count", "pairs.count((True, True)), pairs.count"),
    ],
    ("model/steering.py", ("tests/editing/test_steering.py",)): [
        ("factor", "(self.strength * vector_D)", "(1.0 * vector_D)"),
        ("sign", "return out_ND + added_D", "return out_ND - added_D"),
        ("guard", "if width != config.hidden_size or", "if"),
    ],
    ("editing/steer.py", ("tests/editing/test_steering.py",)): [
        ("order", "[len(row) - 1 for row in rows], reads)", "[len(row) - 2 for row in rows], reads)"),
        ("sign", "(count * vector_D - apart_PD)", "(count * vector_D + apart_PD)"),
        (
            "denominator",
            "length = (lengths[layer] + others[layer]) / 2",
            "length = lengths[layer] + others[layer]",
        ),
    ],
    ("model/changes.py", ("tests/model/test_changes.py",)): [
        ("denominator", "overlap=(written + read) / 2", "overlap=written + read"),
        ("bound", "(reached < 0.9)", "(reached < 0.99)"),
        ("order", "right_RB[:own].t()).square()", "right_RB[-own:].t()).square()"),
    ],
    ("model/lora/side.py", ("tests/train/test_lora.py",)): [
        ("factor", "x, y, self.lora_A, self.lora_B, self.scaling)", "x, y, self.lora_A, self.lora_B, 1.0)"),
    ],
    ("model/lora/merge.py", ("tests/model/test_merging.py",)): [
        ("denominator", "total / agrees.sum(dim=0).clamp(min=1.0)", "total / len(tensors)"),
        ("denominator", "generator=generator) / density", "generator=generator)"),
        ("order", "F.pad(pair.b_FR, (0, surplus))", "F.pad(pair.b_FR, (surplus, 0))"),
    ],
    (
        "model/quant.py",
        (
            f"{PACKING}::test_super_weights_stay_exact",
            f"{PACKING}::test_rows_of_zeros_stay_zeros",
            f"{PACKING}::test_the_input_s_gradient_is_that_of_the_dense_matrix",
        ),
    ): [
        ("mask", "            scaled.view(-1)[spots] = 0", "            pass"),
        (
            "factor",
            "values /= self.columns",
            "values *= self.columns",
            (f"{QUANTISING}::test_gptq_and_awq_leave_smaller_errors_of_outputs",),
        ),
        ("order", "weight.t() if packed.transposed else weight)", "weight)"),
    ],
    (
        "compress/quantize/methods.py",
        (
            f"{QUANTISING}::test_gptq_and_awq_leave_smaller_errors_of_outputs",
            f"{QUANTISING}::test_gptq_keeps_super_weights",
            f"{QUANTISING}::test_gptq_rounds_what_no_token_reached_to_the_nearest_codes",
        ),
    ): [
        ("sign", "weight[block.stop :] -= inverse", "weight[block.stop :] += inverse"),
        ("mask", "torch.where(is_spot[column], full[column], value)", "value"),
        ("denominator", "math.sqrt(top / max(bottom, 1e-30))", "math.sqrt(top)"),
        ("guard", "diagonal[dead] = 1.0", "diagonal[dead] = 0.0"),
        ("order", "absmax.repeat_interleave(eager.NF4_BLOCK)", "absmax.repeat(eager.NF4_BLOCK)"),
        ("order", "codes = flat[::2] << 4 | flat[1::2]", "codes = flat[1::2] << 4 | flat[::2]"),
    ],
    (
        "compress/quantize/select.py",
        (
            f"{QUANTISING}::test_the_knapsack_finds_what_trying_everything_finds",
            f"{QUANTISING}::test_baselines_spend_the_same_bytes",
        ),
    ): [
        ("bound", "            if spent + more <= budget:", "            if more <= budget:"),
        ("bound", "if more <= spare and row.cost", "if row.cost"),
    ],
    ("compress/export/export.py", (f"{EXPORTING}::test_a_modelfile_that_asks_otherwise_fails_the_export",)): [
        ("choice", "    wrong += unlike", "    wrong += []"),
    ],
    ("compress/export/export.py", (f"{EXPORTING}::test_an_export_has_one_model_in_memory",)): [
        ("choice", 'policy.model.to("meta")', "pass"),
    ],
    ("compress/export/export.py", (f"{EXPORTING}::test_an_adapter_leaves_with_a_file_for_llama_cpp",)): [
        ("choice", "gguf.write_lora(adapter, policy.model, out / LORA)", "pass"),
    ],
    (
        "compress/export/parity.py",
        (
            f"{EXPORTING}::test_differences_of_distributions_are_the_formula_s",
            f"{EXPORTING}::test_failures_are_a_line_for_each_thing_that_is_not_the_same",
            f"{EXPORTING}::test_logits_are_taken_at_the_places_that_predict_the_completion",
        ),
    ): [
        ("sign", "(np.exp(p) * (p - q)).sum(-1)", "(np.exp(p) * (q - p)).sum(-1)"),
        ("mask", "(side[:, :num_valid].astype", "(side[:, :].astype"),
        ("order", "[0, len(ids) - 1 :]", "[0, len(ids) :]"),
        ("guard", 'if found.get("stops_missing"):', "if False:"),
        ("guard", 'if found.get("stops_equal", 1.0) < 1.0:', "if False:"),
        ("guard", 'if not found["kl"] <= limits.kl:', 'if found["kl"] > limits.kl:'),
    ],
    ("algo/advantages.py", ("tests/algo/test_advantages.py",)): [
        ("bound", "SPREAD_TOLERANCE = 1e-6", "SPREAD_TOLERANCE = 1e-3"),
        ("bound", "SPREAD_TOLERANCE = 1e-6", "SPREAD_TOLERANCE = 1e-9"),
        ("mask", 'masked_fill(~scored_PG, float("inf")).amin(1)', "amin(1)"),
        ("mask", 'masked_fill(~scored_PG, float("-inf")).amax(1)', "amax(1)"),
        ("mask", "rewards_PG.masked_fill(~scored_PG, 0.0).abs()", "rewards_PG.abs()"),
        ("bound", ".abs().amax(1).clamp(min=1.0)", ".abs().amax(1)"),
        ("bound", "> SPREAD_TOLERANCE * largest", "> SPREAD_TOLERANCE"),
        ("mask", "torch.isfinite(rewards_PG[scored_PG])", "torch.isfinite(rewards_PG)"),
        (
            "denominator",
            "rewards_PG.sum(1) / count_P.clamp(min=1)",
            "rewards_PG.sum(1) / rewards_PG.shape[1]",
        ),
        ("sign", '"none" else rewards_PG - mean_P[:, None]', '"none" else rewards_PG + mean_P[:, None]'),
        ("denominator", "count_P / (count_P - 1).clamp(min=1)", "count_P / count_P.clamp(min=1)"),
        (
            "mask",
            "(rewards_PG - mean_P[:, None]).masked_fill(~scored_PG, 0.0)",
            "(rewards_PG - mean_P[:, None])",
        ),
        ("denominator", "/ (count_P - std_ddof).clamp(min=1)", "/ (count_P - 1).clamp(min=1)"),
        ("factor", "variance_P.sqrt() + eps, 1.0", "variance_P.sqrt(), 1.0"),
        (
            "guard",
            "torch.where(has_spread(rewards_PG, scored_PG), variance_P.sqrt() + eps, 1.0)",
            "variance_P.sqrt() + eps",
        ),
        (
            "mask",
            "standard_deviation(rewards_PG[scored_PG], std_ddof)",
            "standard_deviation(rewards_PG.flatten(), std_ddof)",
        ),
        ("denominator", "if batch_std is None else batch_std", "if True else batch_std"),
        ("factor", "/ (std + eps) if std > 0", "/ std if std > 0"),
        ("guard", "positive_P = mean_P > 0", "positive_P = mean_P != 0"),
        ("guard", ".masked_fill(~positive_P[:, None], 0.0)", ""),
        ("bound", "advantages_PG.clamp(-clip, clip)", "advantages_PG.clamp(max=clip)"),
        (
            "guard",
            "advantages_PG.masked_fill(~has_spread(rewards_PG, scored_PG)[:, None], 0.0)",
            "advantages_PG",
        ),
        ("mask", "return advantages_PG.masked_fill(~scored_PG, 0.0)", "return advantages_PG"),
        ("denominator", "(values.numel() - ddof)", "values.numel()"),
        (
            "guard",
            "values.numel() < 2 or not bool(has_spread(values[None], everywhere))",
            "values.numel() < 2",
        ),
        ("factor", "weight * group_advantages(", "group_advantages("),
        ("sign", "gamma * next_value - values_BT[:, t]", "gamma * next_value + values_BT[:, t]"),
        ("factor", "rewards_BT[:, t] + gamma * next_value", "rewards_BT[:, t] + next_value"),
        ("factor", "gamma * lam * next_advantage", "lam * next_advantage"),
        ("mask", "values_BT.double().masked_fill(~trained_BT, 0.0)", "values_BT.double()"),
        ("sign", "(advantages_BT + values_BT)", "(advantages_BT - values_BT)"),
        ("order", "rewards_T.flip(0).cumsum(0).flip(0)", "rewards_T.cumsum(0)"),
        ("sign", "(expected - length) / cache_length", "(length - expected) / cache_length"),
        ("bound", "expected = max_length - cache_length", "expected = max_length"),
    ],
    ("algo/corrections.py", ("tests/algo/test_corrections.py",)): [
        ("bound", '"token_truncate": (0.0, 2.0)', '"token_truncate": (0.0, 5.0)'),
        ("bound", '"token_mask": (0.5, 5.0)', '"token_mask": (0.5, 2.0)'),
        ("bound", '"sequence_truncate": (0.0, 10.0)', '"sequence_truncate": (0.0, 2.0)'),
        ("bound", '"geometric_mask": (0.999, 1.001)', '"geometric_mask": (0.99, 1.01)'),
        ("bound", '"k3_mask": (0.0, 0.01)', '"k3_mask": (0.0, 0.1)'),
        (
            "sign",
            "log_ratio(proximal_logprobs_M, sampler_logprobs_M)",
            "log_ratio(sampler_logprobs_M, proximal_logprobs_M)",
        ),
        ("guard", "sampler_logprobs_M).detach()", "sampler_logprobs_M)"),
        ("sign", "log_rho_M.expm1() - log_rho_M", "log_rho_M.expm1() + log_rho_M"),
        ("choice", "sequence_means(log_rho_M, sequence_M).exp()", "log_rho_M.exp()"),
        ("denominator", " * lengths_B[sequence_M]", ""),
        ("bound", "sums_M.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()", "sums_M.exp()"),
        ("mask", "(measure_M >= low)", "(measure_M > low)"),
        ("mask", "(measure_M <= high)", "(measure_M < high)"),
        ("bound", "measure_M.clamp(low, high), outside_M", "measure_M.clamp(max=high), outside_M"),
        ("mask", "weights_M.masked_fill(outside_M, 0.0)", "weights_M"),
        ("choice", 'if kind in ("geometric_mask", "k3_mask") else', 'if kind == "k3_mask" else'),
    ],
    ("algo/losses.py", ("tests/algo/test_losses.py", "tests/algo/test_named_losses.py")): [
        ("denominator", "return 1.0 / max(num_tokens, 1)", "return 1.0"),
        ("denominator", "1.0 / max(num_group_tokens, 1) if", "1.0 / max(num_tokens, 1) if"),
        ("denominator", '"token_mean": num_tokens', '"token_mean": num_sequences'),
        ("denominator", '"sequence_mean": num_sequences', '"sequence_mean": num_tokens'),
        ("denominator", '"prompt_mean": num_prompts', '"prompt_mean": num_sequences'),
        ("denominator", '"sequence_sum": num_sequences', '"sequence_sum": num_tokens'),
        ("denominator", '"constant": num_sequences * max_length', '"constant": num_tokens'),
        ("guard", "max(float(table[aggregation]), 1.0)", "float(table[aggregation])"),
        (
            "denominator",
            "torch.bincount(sequence_M, minlength=num_sequences).clamp(min=1)",
            "values_M.numel()",
        ),
        ("sign", "logprobs_M - base_logprobs_M.detach()", "base_logprobs_M.detach() - logprobs_M"),
        ("guard", "base_logprobs_M.detach()", "base_logprobs_M"),
        ("bound", "clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)", "clamp(min=-LOG_RATIO_LIMIT)"),
        ("guard", "advantages_M = advantages_M.detach()", "pass"),
        ("sign", "return -advantages_M * policy_logprobs_M", "return advantages_M * policy_logprobs_M"),
        (
            "sign",
            "(log_ratio_M > clip_high) & (advantages_M > 0)",
            "(log_ratio_M > clip_high) & (advantages_M < 0)",
        ),
        ("sign", "(log_ratio_M < -clip_low)", "(log_ratio_M < clip_low)"),
        ("sign", "log_ratio_M.clamp(min=-clip_low)", "log_ratio_M.clamp(min=clip_low)"),
        ("factor", "mean_M + (log_ratio_M - log_ratio_M.detach())", "mean_M"),
        (
            "factor",
            "sequence_means(log_ratio_M.detach(), sequence_M)",
            "sequence_means(log_ratio_M, sequence_M)",
        ),
        (
            "sign",
            "masked_fill(advantages_M > 0, tau_positive)",
            "masked_fill(advantages_M < 0, tau_positive)",
        ),
        ("denominator", "return -4.0 / tau_M", "return -4.0"),
        ("factor", "tau_M * (ratio_M - 1.0)", "tau_M * ratio_M"),
        (
            "bound",
            "ratio_M.clamp(1.0 - clip_low, 1.0 + clip_high)",
            "ratio_M.clamp(1.0 - clip_low, 1.0 + clip_low)",
        ),
        ("bound", "(ratio_M > 1.0 + clip_high).detach()", "(ratio_M > 1.0 + clip_low).detach()"),
        ("guard", "return -clipped_M.detach()", "return -clipped_M"),
        ("sign", "-torch.minimum(ratio_M * advantages_M", "-torch.maximum(ratio_M * advantages_M"),
        ("mask", "over_M & (advantages_M > 0), under_M", "over_M, under_M"),
        ("mask", "under_M & (advantages_M < 0)", "under_M"),
        ("mask", "(ratio_M > dual_clip).detach() & (advantages_M < 0)", "(ratio_M > dual_clip).detach()"),
        ("sign", "capped_M, -dual_clip * advantages_M", "capped_M, dual_clip * advantages_M"),
        ("mask", "high_M = high_M | capped_M", "high_M = high_M"),
        ("factor", "return 0.5 * delta_M.square()", "return delta_M.square()"),
        ("sign", "torch.expm1(-delta_M) + delta_M", "torch.expm1(delta_M) - delta_M"),
        (
            "choice",
            "log_ratio(policy_logprobs_M, sampler_logprobs_M).exp()",
            "log_ratio(policy_logprobs_M, ref_logprobs_M).exp()",
        ),
        (
            "guard",
            "log_ratio(policy_logprobs_M, sampler_logprobs_M).exp()",
            "log_ratio(policy_logprobs_M, sampler_logprobs_M).exp().detach()",
        ),
        ("factor", "return 0.5 * error_M", "return error_M"),
        ("bound", "(values_M - start_M).clamp(-clip, clip)", "(values_M - start_M).clamp(max=clip)"),
        ("mask", " & ((values_M - start_M).abs() > clip)", ""),
        ("sign", "0.5 * torch.maximum(error_M", "0.5 * torch.minimum(error_M"),
        (
            "mask",
            "torch.where(used, values_M, torch.zeros_like(values_M)) * weights_M",
            "values_M * weights_M",
        ),
        ("denominator", "* weights_M).sum() / denominator", "* weights_M).mean()"),
    ],
    ("algo/packing.py", ("tests/algo/test_packing.py",)): [
        (
            "mask",
            "return sum(self.trained) if self.trained",
            "return sum(not t for t in self.trained) if self.trained",
        ),
        ("denominator", "return sum(self.trained) if self.trained else len", "return len"),
        ("bound", "if used + length <= token_budget", "if used + length < token_budget"),
        ("choice", "best = max(fitting", "best = min(fitting"),
        ("choice", "best = max(fitting, key=lambda number: bins[number][0])", "best = fitting[0]"),
        ("order", "key=lambda i: (-lengths[i], i)", "key=lambda i: (lengths[i], i)"),
        ("mask", "enumerate(outlines) if outline.num_trained]", "enumerate(outlines)]"),
        (
            "denominator",
            "num_trained_tokens=sum(outlines[index].num_trained",
            "num_trained_tokens=sum(outlines[index].num_tokens",
        ),
        ("denominator", "num_trained_sequences=len(trained)", "num_trained_sequences=len(sequences)"),
        ("bound", "own.num_completion > token_budget", "own.num_completion >= token_budget"),
        ("bound", "num_rows = outlines[ordered[0]].num_tokens", "num_rows = 0"),
        ("bound", "family, num_rows = [], own.num_prompt", "family, num_rows = [], 0"),
        ("bound", "return family[0].num_prompt + sum(own.num_completion", "return sum(own.num_tokens"),
        ("order", "[prompt_row + prompt_length - 1, *range", "[prompt_row + prompt_length, *range"),
        ("order", "*range(first_row, first_row + length - 1)]", "*range(first_row + 1, first_row + length)]"),
        (
            "mask",
            "is_trained = sequence.trained or (True,) * length",
            "is_trained = [not t for t in sequence.trained] or (True,) * length",
        ),
        ("mask", "is_trained = sequence.trained or (True,) * length", "is_trained = (True,) * length"),
        ("mask", "Segment(first_row, length, prompt_row, prompt_length)", "Segment(first_row, length, 0, 0)"),
        (
            "denominator",
            "aggregation_weight(count, sequence",
            "aggregation_weight(len(sequence.completion_ids), sequence",
        ),
        ("denominator", "sequence.num_group_tokens, aggregation)", "count, aggregation)"),
        ("choice", 'sequence.advantage if name == "advantages_T" else fill', "fill"),
        (
            "order",
            "indices_B=tuple(index for index, _ in sequences)",
            "indices_B=tuple(range(len(sequences)))",
        ),
        ("choice", 'column("proximal_logprobs_T", 0.0) if is_recomputed else sampler_M', "sampler_M"),
        ("mask", 'column("policy_weights_T", 1.0)', 'column("policy_weights_T", 0.0)'),
        ("choice", 'column("ref_logprobs_T", 0.0)', 'column("proximal_logprobs_T", 0.0)'),
    ],
    ("algo/signal.py", ("tests/algo/test_signal.py",)): [
        ("mask", "weighted_PGX = weighted_PGX.masked_fill(~scored_PG[..., None], 0.0)", "pass"),
        (
            "mask",
            "(weighted_PGX - means_P1X).masked_fill(~scored_PG[..., None], 0.0)",
            "weighted_PGX - means_P1X",
        ),
        ("denominator", "(weighted_PGX.sum(1) / counts_P1)", "weighted_PGX.mean(1)"),
        (
            "guard",
            "torch.where(spread_P, squares_P.clamp(min=1e-300).rsqrt(), 0.0)",
            "squares_P.clamp(min=1e-300).rsqrt()",
        ),
        ("denominator", ".clamp(min=1e-300).rsqrt()", ".clamp(min=1e-300).reciprocal()"),
        ("denominator", "parts_PGX.sum(-1).square().sum(1)", "parts_PGX.square().sum((1, 2))"),
        ("factor", "torch.tensor(weights, dtype=torch.float64)", "1.0"),
        ("sign", "1.0 - total_square / own", "1.0 + total_square / own"),
        ("bound", "max(0.0, 1.0 - total_square / own)", "1.0 - total_square / own"),
        ("bound", "REPEATED_NGRAM = 4", "REPEATED_NGRAM = 3"),
        ("denominator", "len(set(ngrams)) / len(ngrams)", "len(set(ngrams)) / len(ids)"),
    ],
    ("algo/preference.py", ("tests/algo/test_preference.py",)): [
        ("sign", "return policy_B - ref_B.detach()", "return ref_B.detach() - policy_B"),
        ("guard", "ref_B.detach()", "ref_B"),
        (
            "sign",
            "beta * (chosen_ratios_B - rejected_ratios_B)",
            "beta * (rejected_ratios_B - chosen_ratios_B)",
        ),
        ("sign", "label_smoothing * F.logsigmoid(-margin_B)", "label_smoothing * F.logsigmoid(margin_B)"),
        ("factor", "-(1.0 - label_smoothing) * F.logsigmoid(margin_B)", "-F.logsigmoid(margin_B)"),
        ("denominator", "1.0 / (2.0 * beta)", "1.0 / beta"),
        ("denominator", "return -policy_B / num_tokens_B", "return -policy_B"),
        ("factor", " + 0.5 * (margins_B == 0).double()", ""),
        ("sign", "(1.0 - label_smoothing) * right_B - label", "(1.0 - label_smoothing) * right_B + label"),
        ("sign", "torch.relu(1.0 - beta * gap_B)", "torch.relu(1.0 + beta * gap_B)"),
        (
            "sign",
            "1.0 - torch.sigmoid(beta * chosen_ratios_B) +",
            "1.0 + torch.sigmoid(beta * chosen_ratios_B) +",
        ),
        ("factor", "1.0 - torch.sigmoid(beta * gap_B)", "1.0 - torch.sigmoid(gap_B)"),
        ("bound", "logp_B > -math.log(2.0)", "logp_B > 0"),
        ("guard", "mean_logprobs_B.clamp(max=NEARLY_CERTAIN)", "mean_logprobs_B"),
        ("sign", "-chosen_means_B - beta * F.logsigmoid", "-chosen_means_B + beta * F.logsigmoid"),
        ("sign", "ratios_B - kl, kl - ratios_B", "ratios_B - kl, ratios_B - kl"),
        (
            "choice",
            "[undesirable_weight, desirable_weight]",
            "[desirable_weight, undesirable_weight]",
        ),
        ("sign", "rejected_scores_B - margins_B", "rejected_scores_B + margins_B"),
        (
            "sign",
            "(chosen_scores_B + rejected_scores_B).square",
            "(chosen_scores_B - rejected_scores_B).square",
        ),
    ],
    (
        "train/dpo.py",
        ("tests/parity/test_trl_preferences.py", "tests/train/test_dpo.py", "tests/train/test_dpo_loss.py"),
    ): [
        ("denominator", "mismatch / max(num_pairs, 1.0), 0.0)", "mismatch, 0.0)"),
        ("sign", "(ratios_B - kl) * (up_B - down_B)", "(ratios_B - kl) * (down_B - up_B)"),
        ("denominator", "value / share[side] if side in share", "value if side in share"),
        ("choice", "ref_kl_logprob=float(value)", "ref_kl_logprob=0.0"),
    ],
    ("train/data/pairs.py", ("tests/train/test_pairs.py",)): [
        ("choice", "if pair.uid != one.uid", "if pair is not one"),
        ("mask", "other.chosen_ids or other.rejected_ids", "other.chosen_ids"),
        ("guard", "return same if chosen == rejected else (", "return ("),
    ],
    ("train/objective/teacher.py", ("tests/train/test_teacher.py",)): [
        ("order", "logprobs[len(sequence.prompt_ids) - 1 :]", "logprobs[len(sequence.prompt_ids) :]"),
        ("mask", "if is_trained])", "])"),
        ("guard", "if read.strip() != ", 'if "" != '),
    ],
    (
        "generate/reward_model.py",
        ("tests/parity/test_trl_preferences.py", "tests/train/test_reward_model.py"),
    ): [
        ("guard", "ids[-1] == self._pad_id", "False"),
        ("bound", "2 <= len(ids) <= self._config.max_positions", "2 <= len(ids)"),
    ],
    ("model/attention.py", (f"{FAMILY}[gpt_oss]", f"{GRADIENTS}[gpt_oss]", f"{GRADIENTS}[gemma2]")): [
        ("mask", "(key <= query - window)", "(key < query - window)"),
        ("sign", "lse_NH - sinks_H.float()", "lse_NH + sinks_H.float()"),
        ("factor", "(1 - tanh.square_())", "(1 - tanh)"),
    ],
    ("model/recurrence.py", (f"{FAMILY}[qwen3_5]",)): [
        ("factor", "* beta[..., None]", "* 1.0"),
        ("factor", "q * s.key_dim**-0.5", "q"),
    ],
    ("model/mixers.py", (f"{FAMILY}[lfm2]",)): [
        ("factor", "self.out_proj(after_ND * mixed_ND)", "self.out_proj(mixed_ND)"),
    ],
    ("model/transformer.py", (f"{FAMILY}[gemma4]", f"{FAMILY}[gemma4-small]")): [
        ("factor", "return x_ND * self.layer_scalar", "return x_ND"),
        ("guard", "if layer in shared:", "if False:"),
    ],
    ("model/families.py", (f"{FAMILIES}::test_long_rope_factors_are_those_of_the_whole_context",)): [
        ("guard", "divisors = factors[is_long]", "divisors = factors[0]"),
        ("factor", "(factor * longest / context - (factor - 1))", "(factor * longest / context)"),
    ],
    ("model/experts.py", (f"{FAMILY}[deepseek_v3]", f"{FAMILY}[gpt_oss]")): [
        ("factor", "return weights * e.scale, which", "return weights, which"),
        ("guard", "F.pad(rows_ND, (0, 0, 0, -count % ROW_QUANTUM))", "rows_ND"),
    ],
    ("model/experts.py", ("tests/model/test_routing.py",)): [
        ("choice", "which = routed.settle(which,", "routed.settle(which,"),
        ("choice", "return scores_NE / (scores_NE.sum(-1, keepdim=True) + 1e-20)", "return scores_NE"),
    ],
    ("model/routing.py", ("tests/model/test_routing.py",)): [
        ("mask", "torch.where(given_NK < 0, own_NK, given_NK)", "given_NK.clamp(min=0)"),
        ("mask", "(0, 0, 0, surplus), value=-1)", "(0, 0, 0, surplus), value=0)"),
        (
            "mask",
            "F.pad(self._weights, (0, surplus))[",
            "F.pad(self._weights, (0, surplus), value=1.0)[",
        ),
        ("mask", "chosen_NK[: len(counts_NK)]", "chosen_NK[-len(counts_NK) :]"),
        ("bound", "MOST_IN_A_BYTE = 255", "MOST_IN_A_BYTE = 256"),
        ("guard", "if segment.shared or segment.start not in prompts", "if True"),
        ("factor", "weights_N[segment.prefix : segment.prefix + segment.shared] += 1", "pass"),
    ],
    ("train/optim/balance.py", ("tests/model/test_routing.py",)): [
        ("factor", "count * load_LE.sum(0)", "load_LE.sum(0)"),
        ("denominator", "(num_layers * num_tokens) ** 2", "(num_layers * num_tokens**2)"),
        ("denominator", "/ experts.top_k, 1.0)", ", 1.0)"),
        ("sign", "loss + (part - part.detach())", "loss - (part - part.detach())"),
        ("factor", "coef * slopes_E, metrics)", "slopes_E, metrics)"),
    ],
    ("algo/logprobs.py", ("tests/algo/test_logprobs.py",)): [
        ("mask", "logits[:, num_valid:vocab] = ", "logits[:, vocab:vocab] = "),
        (
            "mask",
            'F.pad(logits, (0, surplus_columns), value=float("-inf"))',
            "F.pad(logits, (0, surplus_columns))",
        ),
        ("factor", "        logits = logits / temperature", "        logits = logits * temperature"),
        ("sign", "total_M.log() + top_M1.squeeze(1)", "total_M.log() - top_M1.squeeze(1)"),
        ("sign", ".squeeze(1) - normaliser_M, normaliser_M", ".squeeze(1) + normaliser_M, normaliser_M"),
        ("sign", "normaliser_M - (weights_MV * logits_MV)", "normaliser_M + (weights_MV * logits_MV)"),
        ("denominator", "(weights_MV * logits_MV).sum(-1) / total_M", "(weights_MV * logits_MV).sum(-1)"),
        ("sign", "(-grad_logprob_M[:, None] - grad_entropy_M", "(-grad_logprob_M[:, None] + grad_entropy_M"),
        ("factor", "(logprobs + entropy_M[:, None])", "logprobs"),
        ("denominator", "(-grad_logprob_M / total_M)", "(-grad_logprob_M)"),
        ("denominator", "dz if temperature == 1.0 else dz.div_(temperature)", "dz"),
        ("factor", "grad_weight.addmm_(dz.t(), hidden)", "dz.t() @ hidden"),
        ("guard", "if not temperature > 0:", "if temperature < 0:"),
        ("mask", "valid = vocab if num_valid is None else num_valid", "valid = vocab"),
        ("bound", "max(1024, min(16384,", "max(1, min(16384,"),
        ("sign", "return logp.exp(), logp - logq", "return logp.exp(), logp + logq", TEACHER),
        (
            "sign",
            "probs * (gaps - divergence_M[rows, None])",
            "probs * (gaps + divergence_M[rows, None])",
            TEACHER,
        ),
    ],
    ("algo/config.py", ("tests/train/test_algorithm.py",)): [
        ("choice", "(low if self.low is None else self.low, high", "(low, high"),
        ("choice", "high if self.high is None else self.high", "high"),
        ("factor", "self.num_minibatches * self.num_epochs", "self.num_minibatches + self.num_epochs - 1"),
        ("bound", "self.dual_clip <= 1 + self.clip_high", "self.dual_clip < 1 + self.clip_high"),
        ("bound", "max(1, max_new_tokens // 5)", "max(1, max_new_tokens // 4)"),
        (
            "choice",
            'self.scale == "group" and self.multi_reward',
            'self.scale == "group" or self.multi_reward',
        ),
        (
            "choice",
            'self.whiten or self.baseline == "value" or self.kl == "k1_reward"',
            'self.whiten or self.baseline == "value"',
            cases("kl k1_reward"),
        ),
        ("choice", " or self.entropy_target is not None", ""),
        ("bound", "not low <= value <= high", "not low < value <= high"),
        ("bound", "if group_size < 2 and (", "if group_size < 1 and ("),
        ("bound", "if num_prompts % algo.num_minibatches:", "if algo.num_minibatches > num_prompts:"),
        ("bound", "len(weights) < 2", "len(weights) < 1"),
        ("bound", "steps >= num_steps and steps", "steps > num_steps and steps"),
    ],
    ("train/objective/advantage.py", (OBJECTIVE,)): [
        (
            "denominator",
            "all_gather_values(torch.tensor(scored, dtype=torch.float64))",
            "torch.tensor(scored, dtype=torch.float64)",
        ),
        ("denominator", "everywhere = all_gather_values(scored)", "everywhere = scored"),
        ("guard", "advantage if abs(advantage) > NEGLIGIBLE else 0.0", "advantage"),
        ("denominator", "(sums_PG - mean) / (std + algo.eps) if", "(sums_PG - mean) / std if"),
        ("bound", "clamp(-algo.advantage_clip, algo.advantage_clip)", "clamp(max=algo.advantage_clip)"),
        ("mask", "torch.stack(planes).any(0)", "torch.stack(planes).all(0)"),
        ("mask", "            and sample.num_trained", "            and True"),
        ("mask", 'sample.finish_reason == "length")', 'sample.finish_reason != "length")'),
        (
            "mask",
            'and not (algo.overlong == "filter" and',
            'and not (algo.overlong != "none" and',
        ),
        (
            "denominator",
            "sum(sample.num_trained for sample in members)",
            "sum(len(sample.completion_ids) for sample in members)",
        ),
        (
            "mask",
            "compress(sample.sampler_logprobs, sample.trained)",
            "compress(sample.sampler_logprobs, [not t for t in sample.trained])",
        ),
        ("order", "(end - 1, reward) for end", "(end, reward) for end", ("tests/train/test_episodes.py",)),
        ("guard", 'scale=not (is_flat and algo.baseline != "value")', "scale=True"),
        (
            "order",
            "rewards_T[-1] = sequence.advantage",
            "rewards_T[0] = sequence.advantage",
            cases("kl k1_reward"),
        ),
        ("sign", "rewards_T[-1] -= reward", "rewards_T[-1] += reward", ("tests/train/test_episodes.py",)),
        ("sign", "rewards_T = rewards_T - kl_coef", "rewards_T = rewards_T + kl_coef", cases("kl k1_reward")),
        (
            "mask",
            "torch.arange(max(lengths))[None] < torch",
            "torch.arange(max(lengths))[None] >= torch",
            cases("ppo gae, kl in reward"),
        ),
        (
            "order",
            "advantages_T=advantages_BT[row, :length], returns_T=returns_BT",
            "advantages_T=returns_BT[row, :length], returns_T=returns_BT",
            cases("ppo gae, kl in reward"),
        ),
        ("sign", "(-float(c.min()) for c in columns)", "(float(c.min()) for c in columns)"),
        ("denominator", "mean = total / max(count, 1.0)", "mean = total / max(len(columns), 1.0)"),
        ("denominator", "squares / max(count - 1, 1.0)", "squares / max(count, 1.0)"),
        ("factor", "(column - mean) * factor", "column * factor"),
        (
            "denominator",
            "count, total = all_reduce_sum(sum(map(len, columns)), sum(float(c.sum()) for c in columns))",
            "count, total = sum(map(len, columns)), sum(float(c.sum()) for c in columns)",
        ),
        (
            "denominator",
            "(squares,) = all_reduce_sum(sum(float((c - mean).square().sum()) for c in columns))",
            "squares = sum(float((c - mean).square().sum()) for c in columns)",
        ),
        ("guard", "factor if _spread(columns) > 0 else 0.0", "factor"),
    ],
    ("train/objective/objective.py", (OBJECTIVE,)): [
        (
            "denominator",
            "sum_gradients(self._policy.model.parameters())",
            "pass",
            (f"{OBJECTIVE}::test_statistics_are_those_of_all_ranks",),
        ),
        ("mask", "return sequence.advantage != 0", "return sequence.advantage > 0", cases("grpo")),
        (
            "bound",
            "math.ceil(share * everywhere.numel() - 1e-9)",
            "math.floor(share * everywhere.numel() - 1e-9)",
        ),
        ("mask", "(entropy_T >= floor.to(entropy_T.device))", "(entropy_T < floor.to(entropy_T.device))"),
        ("mask", "chosen_T if weights_T is None else weights_T * chosen_T", "chosen_T"),
        ("denominator", "everywhere = all_gather_values(mine)", "everywhere = mine"),
        (
            "denominator",
            "num_tokens=num_tokens,",
            "num_tokens=num_scored_tokens,",
            cases("dapo", "batch scale"),
        ),
        ("denominator", "num_sequences=num_sequences,", "num_sequences=num_tokens,", cases("grpo")),
        (
            "denominator",
            "sum(s.num_trained / s.num_group_tokens for s in counted)",
            "sum(1 for s in counted)",
            cases("prompt mean"),
        ),
        (
            "denominator",
            "sum(s.num_trained for s in counted),",
            "sum(s.num_tokens for s in counted),",
            cases("dapo"),
        ),
        ("denominator", "value / num_scored_tokens", "value / num_tokens", cases("grpo")),
        (
            "sign",
            "loss_M + self._coefficients.kl * kl_M",
            "loss_M - self._coefficients.kl * kl_M",
            cases("kl k3_unbiased"),
        ),
        (
            "sign",
            "loss_M + self._coefficients.kl * kl_estimate(",
            "loss_M - self._coefficients.kl * kl_estimate(",
            cases("kl k2_loss"),
        ),
        (
            "sign",
            "loss_M - self._coefficients.entropy * entropy_M",
            "loss_M + self._coefficients.entropy * entropy_M",
            cases("entropy bonus"),
        ),
        (
            "choice",
            '"k2" if algo.kl == "k2_loss" else "k3"',
            '"k3" if algo.kl == "k2_loss" else "k2"',
            cases("kl k3_loss"),
        ),
        (
            "mask",
            "torch.where(used_M, policy_M, 0.0) * micro.policy_weights_M",
            "policy_M",
            cases("entropy top 20 %"),
        ),
        (
            "mask",
            '"clip_high": high_M & used_M',
            '"clip_high": high_M',
            cases("entropy top 20 %", "everything"),
        ),
        (
            "denominator",
            "torch.ones_like(loss_M), max(num_tokens, 1.0)",
            "torch.ones_like(loss_M), 1.0",
            cases("ppo"),
        ),
        ("bound", "step < self._value.warmup_steps", "step <= self._value.warmup_steps"),
        (
            "choice",
            'sequence_seed("minibatch", self._seed, step, epoch, s.group)',
            'sequence_seed("minibatch", self._seed, step, s.group)',
        ),
        ("choice", "kind, low=low, high=high", "kind, low=0.0, high=high", cases("token_mask")),
        (
            "order",
            "self._reference.follow(self._policy.model, step + 1)",
            "self._reference.follow(self._policy.model, step)",
        ),
        (
            "factor",
            '"hidden_MD": hidden_MD, "temperature": self._temperature}',
            '"hidden_MD": hidden_MD}',
            cases("grpo"),
        ),
        (
            "sign",
            "replace(sequence, advantages_T=own + gains_T)",
            "replace(sequence, advantages_T=own - gains_T)",
            TEACHER,
        ),
        (
            "sign",
            "loss_M + self._teaches.coef * divergence_M",
            "loss_M - self._teaches.coef * divergence_M",
            TEACHER,
        ),
        ("mask", "needs_all or has_advantage(s)", "has_advantage(s)", cases("kl k2_loss")),
        (
            "order",
            "index * count // len(everywhere)",
            "(len(everywhere) - 1 - index) * count // len(everywhere)",
            cases("2 x 2 updates"),
        ),
    ],
    (
        "train/objective/tally.py",
        tuple(f"{OBJECTIVE}::test_{name}" for name in ("sampler_metrics_by_hand", "critic_metrics_by_hand")),
    ): [
        ("choice", 'max(old, value) if name.endswith("_max") else old + value', "old + value"),
        ("sign", '"gap": log_rho_M.abs()', '"gap": log_rho_M'),
        ("sign", '"k3": log_rho_M.expm1() - log_rho_M', '"k3": log_rho_M.expm1() + log_rho_M'),
        ("denominator", "gap / tokens", "gap"),
        ("denominator", "k3 / tokens", "k3"),
        ("denominator", "rho**2 / (rho_square * tokens)", "rho**2 / rho_square"),
        ("denominator", "active / tokens", "active"),
        ("factor", "log_rho_M.expm1().abs().max()", "log_rho_M.exp().abs().max()"),
        ("factor", "0.5 * square / count", "square / count"),
        (
            "sign",
            "total_square / count - (total / count) ** 2",
            "total_square / count + (total / count) ** 2",
        ),
        (
            "sign",
            "start_square / count - (start_error / count) ** 2",
            "start_square / count + (start_error / count) ** 2",
        ),
        ("sign", "1.0 - unexplained / variance", "unexplained / variance"),
        ("denominator", "norm / max(updates, 1.0)", "norm / count"),
        ("denominator", "clipped / count", "clipped"),
        (
            "denominator",
            "sum(values) / len(values)",
            "sum(values) / len(results)",
            (f"{OBJECTIVE}::test_means_of_metrics_are_over_the_updates_that_have_them",),
        ),
    ],
    ("train/objective/reference.py", (OBJECTIVE,)): [
        ("order", "step % self._refresh_every == 0", "step % self._refresh_every == 1"),
        (
            "factor",
            "local(mine).lerp_(local(model.get_parameter(name)), 1.0 - self._ema)",
            "local(mine).lerp_(local(model.get_parameter(name)), self._ema)",
        ),
        (
            "choice",
            "KL_RAISE, KL_LOWER, KL_BAND = 1.5, 0.8, 1.5",
            "KL_RAISE, KL_LOWER, KL_BAND = 1.5, 0.5, 1.5",
        ),
        ("bound", "kl > KL_BAND * target", "kl > target"),
        ("bound", "kl < target / KL_BAND", "kl < target"),
        ("bound", "KL_COEF_RANGE[0]), KL_COEF_RANGE[1])", "KL_COEF_RANGE[0]), 100.0)"),
        ("sign", "self._last_entropy <= target", "self._last_entropy >= target"),
        (
            "sign",
            "(final - self._algo.entropy_coef) * progress",
            "(self._algo.entropy_coef - final) * progress",
        ),
        ("sign", "ENTROPY_STEP if entropy < self._algo", "ENTROPY_STEP if entropy > self._algo"),
        ("bound", "max(self._entropy + move, 0.0)", "self._entropy + move"),
        ("factor", "LR_FACTOR * optim.lr if value.lr is None", "optim.lr if value.lr is None"),
    ],
    ("train/rollout/source.py", ("tests/train/test_account.py", "tests/train/test_source.py")): [
        ("denominator", "self.pending -= count + sum(dropped.values())", "self.pending -= count"),
        ("mask", "self.dropped[reason] += number", "self.dropped[reason] = number"),
        ("sign", "        self.in_flight -= count", "        self.in_flight += count"),
        ("choice", "        if skipped:", "        if not skipped:"),
        ("guard", " and min(counts) >= 0", ""),
        (
            "denominator",
            "missing = self._num_prompts - int(total)",
            "missing = self._num_prompts",
            ("tests/train/test_rl.py::test_refill_samples_until_the_batch_is_full",),
        ),
        ("bound", "self._num_steps - 1)", "self._num_steps)"),
        ("bound", "ahead = min(step + self._staleness,", "ahead = min(step,"),
        ("mask", "[is_kept or teaches for teaches", "[teaches for teaches"),
        (
            "mask",
            "for place, is_used in enumerate(useful) if is_used)",
            "for place, is_used in enumerate(useful) if not is_used)",
        ),
        ("mask", "all(sample.reward is None for sample", "any(sample.reward is None for sample"),
        (
            "denominator",
            "            num_refilled += missing",
            "            num_refilled = missing",
            ("tests/train/test_source.py", "tests/train/test_rl.py::test_refill_gives_up_after_its_rounds"),
        ),
    ],
    ("train/rollout/curriculum.py", ("tests/train/test_curriculum.py",)): [
        ("bound", "if length <= cut]", "if length < cut]"),
        ("bound", "if low < share < high}", "if low <= share < high}"),
        ("bound", "if low < share < high}", "if low < share <= high}"),
        (
            "bound",
            "math.ceil(round(percent * len(lengths) / 100, 9))",
            "math.floor(percent * len(lengths) / 100)",
        ),
        (
            "bound",
            "math.ceil(round(percent * len(lengths) / 100, 9))",
            "math.ceil(percent * len(lengths) / 100)",
        ),
        ("denominator", "self.num_right / self.num_samples", "self.num_right / max(self.num_right, 1)"),
        ("order", "for index in sorted(drawn)]", "for index in drawn]"),
        (
            "order",
            "grades[index * num_samples : (index + 1) * num_samples]",
            "grades[index : index + num_samples]",
        ),
        ("denominator", "totals = all_reduce_sum(*counts)", "totals = counts"),
        (
            "bound",
            "sum(low <= share < high for share in between)",
            "sum(low < share < high for share in between)",
        ),
        ("guard", "0 <= right <= samples > 0", "0 <= right <= samples"),
        ("choice", 'config.unmeasured == "keep"', 'config.unmeasured == "drop"'),
    ],
    ("train/optim/step.py", ("tests/train/test_step.py",)): [
        ("factor", "config.lr * (step + 1) / config.warmup_steps", "config.lr * step / config.warmup_steps"),
        (
            "denominator",
            "max(1, num_steps - 1 - config.warmup_steps)",
            "max(1, num_steps - config.warmup_steps)",
        ),
        ("sign", "0.5 * (1 + math.cos(math.pi * progress))", "0.5 * (1 - math.cos(math.pi * progress))"),
        ("factor", "(1 - config.final_lr_share) * shape", "shape"),
        (
            "bound",
            "min(1.0, self._config.max_grad_norm / (norm + 1e-6))",
            "self._config.max_grad_norm / (norm + 1e-6)",
        ),
        ("denominator", "self._config.max_grad_norm / (norm + 1e-6)", "self._config.max_grad_norm"),
        (
            "mask",
            "decay = config.weight_decay if is_matrix(*self._named[index]) else 0.0",
            "decay = config.weight_decay",
        ),
        (
            "mask",
            "weight_decay=self._config.weight_decay if decays else 0.0",
            "weight_decay=self._config.weight_decay",
        ),
        (
            "guard",
            "math.isfinite(norm) and math.isfinite(loss)",
            "math.isfinite(norm)",
            (
                "tests/train/test_step.py",
                "tests/train/test_rl.py::test_a_gradient_that_is_not_finite_stops_the_run",
            ),
        ),
        ("factor", 'totals["loss"] += float', 'totals["loss"] = float'),
        ("choice", "max(totals.get(name, value), value)", "value"),
        ("factor", "totals.get(name, 0.0) + value", "value"),
        (
            "order",
            "betas=(self._config.beta1, self._config.beta2)",
            "betas=(self._config.beta2, self._config.beta1)",
        ),
        (
            "factor",
            "math.sqrt(sum_over_shares([self._named[index][1] for index in used], squares))",
            "sum_over_shares([self._named[index][1] for index in used], squares)",
        ),
    ],
    (
        "train/optim/optimizer.py",
        (
            "tests/train/test_step.py",
            "tests/train/test_optimizer.py::test_master_weights_go_the_way_of_a_float32_model",
            "tests/train/test_optimizer.py::test_adamw_of_a_bfloat16_model_against_float64",
            "tests/train/test_optimizer.py::test_weights_of_16_bits_move_by_their_updates_on_average",
            "tests/train/test_optimizer.py::test_shares_of_weights_draw_the_bits_of_the_whole",
        ),
    ): [
        ("bound", "self._low.view(-1)[part].copy_(low)", "pass"),
        ("bound", "low.where((chosen != 0) & chosen.isfinite(), 0)", "low"),
        ("factor", "(mixed >> 48)", "(mixed >> 49)"),
        ("order", "index[..., None] * AXIS + axis", "index[..., None] * AXIS + 0 * axis"),
        ("factor", "[wide * factor if factor != 1 else wide]", "[wide]"),
        ("bound", "bits.add_(2**15)", "bits.add_(2**14)"),
        ("bound", "bits.add_(self._low.view(-1)[part])", "bits"),
        ("factor", "return float(rows.double().square().sum())", "return float(rows.double().sum())"),
        ("order", "step=float(step), factor=factor", "step=1.0, factor=factor"),
    ],
    (
        "train/optim/safety.py",
        (
            "tests/train/test_session.py::test_wrong_settings",
            "tests/train/test_session.py::test_out_of_memory_halves_the_micro_batch_for_the_same_gradient",
            "tests/train/test_session.py::test_the_rehearsal_finds_the_budget_before_any_data",
            "tests/train/test_session.py::test_other_errors_are_no_lack_of_memory",
            "tests/train/test_session.py::test_deterministic_modes",
        ),
    ): [
        ("bound", "if self.keep < 2:", "if self.keep < 1:"),
        ("bound", "if self.max_skipped < 0:", "if self.max_skipped < -9:"),
        ("bound", "max(longest, self.tokens // 2)", "longest"),
        (
            "choice",
            '"strict" if device.type == "cpu" else "off"',
            '"off" if device.type == "cpu" else "strict"',
        ),
        ("guard", "if not is_out_of_memory(error):", "if False:"),
        ("bound", "count = max(1, tokens // length)", "count = 1"),
    ],
    ("stats.py", (STATS,)): [
        (
            "denominator",
            "math.comb(num_samples - num_correct, k)) / ways",
            "math.comb(num_samples - num_correct, k)) / num_samples",
        ),
        ("sign", "math.comb(num_samples - num_correct, k)", "math.comb(num_correct, k)"),
        ("denominator", "for answer in winners) / len(winners)", "for answer in winners) / len(votes)"),
        ("mask", "votes.items() if count == most]", "votes.items()]"),
        ("sign", "difference, size = b - a, a.size + 1", "difference, size = a - b, a.size + 1"),
        ("denominator", "difference, size = b - a, a.size + 1", "difference, size = b - a, a.size"),
        (
            "denominator",
            "(squares / size - centre**2, 0.0) / size)",
            "(squares / size - centre**2, 0.0) / a.size)",
        ),
        ("factor", "float((difference**2).sum()) + largest**2", "float((difference**2).sum())"),
        ("bound", "        p = max(p, 2.0 ** (1 -", "        p = min(p, 2.0 ** (1 -"),
        ("bound", "(1 - int(np.count_nonzero(", "(0 - int(np.count_nonzero("),
        ("guard", "    if p >= 1 - confidence:", "    if False:"),
        ("choice", "p = exact_p if p < 1 - confidence else max(p, exact_p)", "p = exact_p"),
        ("factor", "(float(((values - mean) ** 2).sum()) + 0.25)", "(float(((values - mean) ** 2).sum()))"),
        ("denominator", "_wilson(mean, values.size / effect,", "_wilson(mean, values.size,"),
        ("bound", "_t_quantile(0.95, max(1, values.size - 1))", "_two_sided_z(0.95)"),
        (
            "bound",
            "range(3 if freedom % 2 else 2, freedom - 1, 2)",
            "range(3 if freedom % 2 else 2, freedom, 2)",
        ),
        ("bound", "return max(1 - inside, 1e-15)", "return 1 - inside"),
        ("factor", "(n * share + z * z / 2)", "(n * share + z * z / 4)"),
        (
            "denominator",
            "centre = (n * share + z * z / 2) / (n + z * z)",
            "centre = (n * share + z * z / 2) / n",
        ),
        ("bound", "1.0 if successes == n else interval.high", "interval.high"),
        ("sign", "1.0 if successes == n else interval.high", "1.0 if successes == n else interval.low"),
        (
            "choice",
            "if np.isin(values, (0.0, 1.0)).all():",
            "if False:",
            ("tests/eval/test_eval_metrics.py",),
        ),
        (
            "bound",
            "max(lowest, -unseen), min(highest, unseen)",
            "-unseen, unseen",
            ("tests/eval/test_eval_metrics.py", STATS),
        ),
        (
            "choice",
            "1 - wilson_interval(n, n).low",
            "wilson_interval(n, n).low",
            ("tests/eval/test_eval_metrics.py",),
        ),
        ("choice", "for i in range(min(b, c)):", "for i in range(max(b, c)):"),
        ("factor", "2 * tail / 2 ** (b + c)", "tail / 2 ** (b + c)"),
        ("bound", "if number <= observed)", "if number < observed)", ("tests/eval/test_eval_metrics.py",)),
        (
            "bound",
            "range(max(0, total - num_b)",
            "range(max(0, total - num_a)",
            ("tests/eval/test_eval_metrics.py",),
        ),
        (
            "denominator",
            "edge = 1 / (values.size + 1)",
            "edge = 1 / values.size",
            ("tests/eval/test_eval_metrics.py",),
        ),
        (
            "guard",
            "max(float(values.var()), edge * (1 - edge))",
            "float(values.var())",
            ("tests/eval/test_eval_metrics.py",),
        ),
        (
            "denominator",
            "float(values.var())",
            "float(values.var(ddof=1))",
            ("tests/eval/test_eval_metrics.py",),
        ),
        ("factor", "math.sqrt(2 * p * (1 - p) / n)", "math.sqrt(p * (1 - p) / n)"),
        ("bound", "inv_cdf((1 + confidence) / 2)", "inv_cdf(confidence)"),
        ("denominator", "freedom = max(1, size - 1)", "freedom = max(1, size)"),
        ("factor", "t * math.sqrt((freedom + 1) / freedom)", "t"),
        ("choice", "((means < mean).mean() + (means <= mean).mean()) / 2", "(means < mean).mean()"),
        ("choice", "((means < mean).mean() + (means <= mean).mean()) / 2", "(means <= mean).mean()"),
        ("sign", "below = ((means < mean)", "below = 1 - ((means < mean)"),
        ("factor", "/ (6 * squares**1.5)", "/ (2 * squares**1.5)"),
        ("sign", "stretch = 1 - acceleration * side", "stretch = 1 + acceleration * side"),
        ("guard", "side / stretch if stretch > 0 else side", "side / stretch"),
        (
            "factor",
            "bias + (side / stretch if stretch > 0 else side)",
            "side / stretch if stretch > 0 else side",
        ),
    ],
    ("eval/compare/paired.py", ("tests/eval/test_paired.py",)): [
        ("choice", "return self.p_holm < ALPHA", "return self.p < ALPHA"),
        ("bound", "range(1, num_samples.bit_length())", "range(2, num_samples.bit_length())"),
        ("mask", "a is not None and b is not None]", "a is not None]"),
        ("sign", "paired_interval(a, b, bounds", "paired_interval(b, a, bounds"),
        ("bound", "right_a, right_b = a > 0.5, b > 0.5", "right_a, right_b = a >= 0.5, b >= 0.5"),
        (
            "sign",
            "(int((right_a & ~right_b).sum()), int((right_b & ~right_a).sum()))",
            "(int((right_b & ~right_a).sum()), int((right_a & ~right_b).sum()))",
        ),
        ("choice", "exact_p = mcnemar_exact(*flips)", "exact_p = None"),
        ("choice", "bounds = (-1.0, 1.0) if unit(", "bounds = (0.0, 1.0) if unit("),
        ("denominator", "difference_P.std(ddof=1)) / math.sqrt(n)", "difference_P.std(ddof=1))"),
        ("denominator", "float(difference_P.std(ddof=1))", "float(difference_P.std())"),
        ("bound", "FEWEST_FLIPS / n", "1 / n"),
        ("denominator", "(len(p_values) - rank) * p_values[place]", "len(p_values) * p_values[place]"),
        ("bound", "running = max(running, min(1.0,", "running = (min(1.0,"),
        ("choice", "table[name] = replace(table[name], p_holm=p)", "pass"),
        ("sign", 'word = "higher" if row.difference.mean > 0', 'word = "higher" if row.difference.mean < 0'),
        ("sign", "100 * (value - base) / abs(base)", "100 * (base - value) / abs(base)"),
        ("denominator", '"pass@1": [count / num_samples', '"pass@1": [count / len(rows)'),
        ("mask", "row[:num_samples] for row in samples", "row for row in samples"),
    ],
    (
        "eval/metrics.py",
        (
            "tests/eval/test_eval_metrics.py",
            "tests/eval/test_evaluate.py::test_metrics_by_hand",
            "tests/eval/test_evaluate.py::test_pass_at_1_by_label",
        ),
    ): [
        (
            "sign",
            'mean_P(lambda done: done.finish_reason == "length")',
            'mean_P(lambda done: done.finish_reason != "length")',
        ),
        ("bound", "        if len(rows) > 1:", "        if len(rows) > 0:"),
        ("bound", "if pass_at_1 < NEAR_ZERO:", "if pass_at_1 <= NEAR_ZERO:"),
        (
            "denominator",
            '"pass@1": [c / count for c in correct_P]',
            '"pass@1": [c / len(correct_P) for c in correct_P]',
        ),
        ("choice", "highest = max((done.reward", "highest = min((done.reward"),
        ("choice", "if done.reward == highest])", "])"),
        ("choice", 'done.grade.verdict == "perfect"', 'done.grade.verdict != "none"'),
        ("bound", "sum(0 < c < count for c in correct_P)", "sum(0 <= c < count for c in correct_P)"),
        ("sign", "paired_interval(pass_P[1], pass_P[count]", "paired_interval(pass_P[count], pass_P[1]"),
        ("guard", "1.0 if count > 1 else math.inf", "1.0"),
        ("mask", "done.grade.is_correct == is_right]", "done.grade.is_correct != is_right]"),
        (
            "denominator",
            "bootstrap_interval([_mean(row) for row in rows], seed=seed)",
            "bootstrap_interval(values, seed=seed)",
        ),
        ("choice", '"num_samples": len(values)', '"num_samples": len(rows)'),
        ("denominator", "verdicts.count(name) / len(verdicts)", "verdicts.count(name) / len(samples)"),
        ("denominator", "return sum(values) / len(values)", "return sum(values) / max(1, len(values) - 1)"),
        ("choice", "is_count = name in COUNTS", "is_count = False"),
        ("bound", "is_anecdote = count == 1 or len(problems) == 1", "is_anecdote = count == 1"),
    ],
    ("eval/confidence.py", ("tests/eval/test_confidence.py",)): [
        (
            "mask",
            "enumerate(logprobs) if not trained or trained[place]]",
            "enumerate(logprobs) if not trained or not trained[place]]",
        ),
        ("mask", "enumerate(logprobs) if not trained or trained[place]]", "enumerate(logprobs)]"),
        ("mask", "range(first, end) if not trained or trained[place]]", "range(first, end)]"),
        ("bound", "if len(answer) > LONGEST_VOTE:", "if len(answer) >= LONGEST_VOTE:"),
        ("order", "key=lambda text: (-counts[text], text)", "key=lambda text: -counts[text]"),
        ("choice", "answers_equal(left, right) and answers_equal(right, left)", "answers_equal(left, right)"),
        ("denominator", "sum(right[vote]) / len(right[vote])", "float(right[vote][0])"),
        (
            "denominator",
            "max(votes.values(), default=0) / len(answers)",
            "max(votes.values(), default=0) / max(votes.total(), 1)",
        ),
        ("sign", "math.log(total / count)", "math.log(count / total)"),
        (
            "mask",
            "group_votes(answers) if group is not None).values()",
            "group_votes(answers) if group).values()",
        ),
        ("order", "key=num_characters) - 1", "key=num_characters)"),
        ("sign", "sum(not _is_same(left, right)", "sum(_is_same(left, right)"),
        ("order", "close = text.rfind(schema.answer_close)", "close = text.find(schema.answer_close)"),
        ("denominator", "round(sum(values) / len(values), 6)", "round(sum(values), 6)"),
    ],
    ("eval/grade.py", ("tests/eval/test_evaluate.py", "tests/eval/test_eval_metrics.py")): [
        ("choice", 'answer is None and answer_from == "anywhere"', "answer is None"),
        ("choice", "is_judged=is_correct is not None", "is_judged=True"),
        ("sign", "max(0, self.num_tokens - self.grade.thinking_tokens)", "self.grade.thinking_tokens"),
        ("order", "end - ids.index(opening[0]) - 1 if", "end - ids.index(opening[0]) if"),
        ("choice", "if response.thinking is None", "if response.answer is None"),
    ],
    (
        "eval/measure.py",
        (
            "tests/eval/test_eval_program.py",
            "tests/eval/test_evaluate.py",
        ),
    ): [
        ("factor", "prompt_tokens=2 * sum(map(len, prompts))", "prompt_tokens=sum(map(len, prompts))"),
        ("mask", "sum(sum(done.trained) if done.trained else len(done.ids)", "sum(len(done.ids)"),
        (
            "denominator",
            'sum(seconds * reading["mean"] for seconds, reading in known) / total',
            'sum(reading["mean"] for seconds, reading in known) / len(known)',
        ),
        (
            "order",
            "[row[1:] for row in rows], [row[0] for row in rows]",
            "[row[:-1] for row in rows], [row[-1] for row in rows]",
        ),
        (
            "choice",
            "SamplingParams(temperature=0.0, max_new_tokens",
            "SamplingParams(temperature=1.0, max_new_tokens",
        ),
        (
            "choice",
            'sequence_seed("eval", seed, problem.uid, index)',
            'sequence_seed("eval", seed, problem.uid)',
        ),
        ("guard", "if windows and len(windows) == len(parts) else None", "if windows else None"),
        ("choice", "None if None in highs else max(highs)", "None if None in highs else min(highs)"),
        ("factor", "sum(joules) if is_whole", "max(joules) if is_whole"),
        ("mask", "sum(not graded.is_judged for graded in grades)", "0", ("tests/eval/test_evaluate.py",)),
    ],
    ("rewards/base.py", ("tests/rewards/test_base.py",)): [
        ("bound", "own_pool(reward, timeout_s) if pool", "own_pool(reward) if pool"),
        ("bound", "(own_reward(reward, timeout_s=timeout_s) for", "(own_reward(reward) for"),
        ("factor", "sum(reward.weight * (score or 0.0) for", "sum((score or 0.0) for"),
        ("mask", "None if None in row else total", "total"),
        ("bound", "num_failed > FAILURE_LIMIT * len(items)", "num_failed > 0"),
        ("bound", "len(items) >= MIN_BATCH", "len(items) >= 99 * MIN_BATCH"),
        ("choice", "(preset.best if weights[name] >= 0 else preset.worst)", "preset.best"),
        ("guard", "names.count(name) > 1", "names.count(name) > 2"),
        ("factor", "sum(reward.weight * (reward.best or 0.0)", "sum((reward.best or 0.0)"),
        ("guard", "        if not abs(weight) <= LARGEST_REWARD:", "        if False:"),
        (
            "choice",
            "return None if is_correct is None else float(is_correct)",
            "return float(bool(is_correct))",
        ),
        ("choice", "float(number) if equals else 1.0", "1.0"),
    ],
    ("rewards/presets.py", ("tests/rewards/test_presets.py",)): [
        ("bound", "BANDS = ((Fraction(1, 10), 2.0)", "BANDS = ((Fraction(1, 5), 2.0)"),
        ("bound", "if error <= limit", "if error < limit"),
        ("denominator", "(abs(truth.value) or truth.last_place)", "(abs(truth.value) or 1)"),
        ("sign", "abs(guess.value - truth.value)", "abs(guess.value + truth.value)"),
        ("choice", "TAG_ONCE if completion.count(tag) == 1", "TAG_ONCE if completion.count(tag) >= 1"),
        ("denominator", "sum(scores) * NOTEBOOK_TAGS / len(tags)", "sum(scores)"),
        (
            "sign",
            "COSINE_RIGHT if is_correct else COSINE_WRONG",
            "COSINE_WRONG if is_correct else COSINE_RIGHT",
        ),
        ("sign", "(1.0 + math.cos(math.pi * length / limit))", "(1.0 - math.cos(math.pi * length / limit))"),
        ("bound", "latest.get(window, -reach - 1) <= reach", "latest.get(window, -reach - 1) < reach"),
        ("denominator", "return repeated / max(count, 1)", "return repeated / max(len(items), 1)"),
        ("bound", "idle >= DEGENERATE_SHARE", "idle > DEGENERATE_SHARE"),
        ("mask", 'len(verdicts) - verdicts.count("unchecked")', "len(verdicts)"),
        ("sign", "(LENGTH_FREE - len(completion))", "(len(completion) - LENGTH_FREE)"),
        ("denominator", "/ (LENGTH_LIMIT - LENGTH_FREE)", "/ LENGTH_LIMIT"),
        (
            "choice",
            "NUMBER_EQUAL if guess is not None and guess.value in truths",
            "NUMBER_EQUAL if guess is not None",
        ),
        ("choice", "None if is_correct is None else 1.0", "1.0"),
    ],
    ("rewards/answers/equal.py", ("tests/rewards/test_equal.py", "tests/rewards/test_equal_forms.py")): [
        ("mask", "        del remaining[found]", "        pass"),
        ("factor", "percent.value == plain.value * 100", "percent.value == plain.value * 10"),
        ("choice", "if first_percent == second_percent:", "if True:"),
        ("choice", "left.brackets != right.brackets and len(left.items) == 2", "False"),
        (
            "bound",
            "left.brackets != right.brackets and len(left.items) == 2",
            "left.brackets != right.brackets",
        ),
        ("guard", "    if len(left.items) != len(right.items):", "    if False:"),
        (
            "choice",
            "return all(_values_equal(a, b, ordered) for a, b in zip(left.items",
            "return any(_values_equal(a, b, ordered) for a, b in zip(left.items",
        ),
        ("guard", "        if units_conflict(first_unit, second_unit):", "        if False:"),
        ("guard", "if any(map(_BOX_AFTER_BOX.search, (left, right))):", "if False:"),
        ("choice", "if plain_number and not is_plain_number(left):", "if False:"),
        ("choice", '(set() if ordered else {"bare"})', '{"bare"}'),
        ("choice", "if len(distinct) > 1 else sequence", ""),
        ("guard", "and gold.value.denominator > 1", ""),
    ],
    ("rewards/answers/extract.py", ("tests/rewards/test_extract.py",)): [
        ("order", "end = text.rfind(ANSWER_CLOSE)", "end = text.find(ANSWER_CLOSE)"),
        ("bound", "if len(outer) < 2 or", "if len(outer) < 3 or"),
        ("order", 'start = text.rfind("####")', 'start = text.find("####")'),
        ("order", "result = sides[-1]", "result = sides[0]"),
        ("guard", "if len(numbers) == 1 else answer", "if numbers else answer"),
        ("order", "range(len(mentions) - 1, -1, -1)", "range(len(mentions))"),
        ("order", '    "tags": from_tags,', '    "box": from_box, "tags": from_tags,'),
        ("guard", 'if "$" not in tail:', "if True:"),
        ("guard", "if reasons:", "if False:"),
        ("guard", "if number is None:  # the last", "if False:  # the last"),
    ],
    (
        "rewards/answers/numbers.py",
        ("tests/rewards/test_equal.py", "tests/rewards/test_equal_forms.py", "tests/rewards/test_presets.py"),
    ): [
        ("bound", "MIN_ROUNDED_DIGITS = 4", "MIN_ROUNDED_DIGITS = 3"),
        ("bound", "MIN_ROUNDED_DIGITS = 4", "MIN_ROUNDED_DIGITS = 5"),
        ("bound", "MIN_TRUNCATED_DIGITS = 6", "MIN_TRUNCATED_DIGITS = 5"),
        ("bound", "MIN_SHORTENED_DIGITS = 5", "MIN_SHORTENED_DIGITS = 4"),
        ("sign", "shift = exponent - len(part)", "shift = exponent + len(part)"),
        ("sign", "        digits = -digits", "        digits = digits"),
        ("denominator", "(10 ** len(cycle) - 1) * 10 ** len(fixed)", "10 ** len(cycle) * 10 ** len(fixed)"),
        ("denominator", "short.last_place / 2", "short.last_place"),
        (
            "sign",
            "short = left if left.last_place > right.last_place",
            "short = left if left.last_place < right.last_place",
        ),
        ("bound", "if bottom == 0 or top >= bottom:", "if bottom == 0:"),
        ("guard", "top is None or bottom is None or bottom.value == 0", "top is None or bottom is None"),
        ("guard", " or decimal.last_place >= 1:", ":"),
    ],
    ("rewards/answers/texts.py", ("tests/rewards/test_neighbours.py",)): [
        ("factor", "hour % 12 + (12 if half", "hour % 12 + (0 if half"),
        (
            "order",
            "month, day = (second, first) if is_day_first",
            "month, day = (first, second) if is_day_first",
        ),
        ("guard", "int(part) > 255", "int(part) > 25"),
        ("guard", "        and sides == other_sides", "        and True"),
        ("choice", "2 * num_texts > num_golds", "2 * num_texts > 2 * num_golds"),
    ],
    ("rewards/answers/units.py", ("tests/rewards/test_neighbours.py", "tests/rewards/test_symbolic.py")): [
        ("sign", "            sign = -1", "            sign = 1"),
        ("factor", 'powers[last] *= 2 if word[0] == "s" else 3', "powers[last] *= 1"),
        ("choice", "return first != second", "return first.keys() != second.keys()"),
    ],
    ("rewards/answers/structure.py", ("tests/rewards/test_equal.py", "tests/rewards/test_equal_forms.py")): [
        (
            "sign",
            'lower = text.replace("±", "-").replace("∓", "+")',
            'lower = text.replace("±", "+").replace("∓", "-")',
        ),
        ("sign", 'members, operators = members[::-1], [{">"', 'members, operators = members, [{">"'),
        ("factor", "Number(number.value * scale, number.is_decimal)", "number"),
        (
            "choice",
            'Sequence("set" if opening == SET_OPEN else "bare", value.items)',
            'Sequence("bare", value.items)',
        ),
        ("choice", 'is_percent = core.endswith("%")', "is_percent = False"),
        ("bound", "<= float(unit) * (1 + 1e-9)", "<= 10 * float(unit)"),
        ("choice", 'return Sequence("matrix", rows) if rows else', "return"),
    ],
    ("generate/sampling.py", ("tests/generate/test_sampling.py",)): [
        ("bound", "logits_BV.topk(params.top_k, dim=-1)", "logits_BV.topk(params.top_k + 1, dim=-1)"),
        ("sign", "+ torch.log(torch.tensor(params.min_p))", "- torch.log(torch.tensor(params.min_p))"),
        (
            "mask",
            "masked_fill(logits_BV < _nucleus_floor(logits_BV, params.top_p), cut)",
            "masked_fill(logits_BV <= _nucleus_floor(logits_BV, params.top_p), cut)",
        ),
        ("bound", "values.double().cumsum(-1) - values.double()", "values.double().cumsum(-1)"),
        (
            "order",
            "bits = _mix_32((key + 0x9E3779B9 * (index_B + 1))",
            "bits = _mix_32((key + 0x9E3779B9 * (index_B + 2))",
        ),
        ("factor", "(bits.double() + 0.5) * 2.0**-24", "bits.double() * 2.0**-24"),
        ("mask", "(seeds_B >> 32) & MASK_32", "seeds_B & 0"),
        ("choice", "if params.temperature == 0:", "if params.temperature < 0:"),
        ("choice", "wanted = uniforms_B * cumulative[:, -1]", "wanted = uniforms_B"),
        ("order", "block.squeeze(1) * CDF_BLOCK + _search", "block.squeeze(1) + _search"),
        (
            "sign",
            "cumulative.gather(1, block) - sums.gather(1, block)",
            "cumulative.gather(1, block) + sums.gather(1, block)",
        ),
        ("denominator", "(wanted[:, None] - before) / sums.gather(1, block)", "(wanted[:, None] - before)"),
        (
            "choice",
            "return self.top_k > 0 or self.top_p < 1 or self.min_p > 0",
            "return self.top_k > 0 or self.top_p < 1",
        ),
        ("mask", "select_logprobs(kept_BV, tokens, normaliser)[0]", "select_logprobs(logits_BV, tokens)[0]"),
    ],
    ("generate/scoring.py", cases("grpo")): [
        (
            "order",
            "hidden_ND.index_select(0, source_M)",
            "hidden_ND.index_select(0, source_M + 1)",
        ),
        ("factor", "            temperature=temperature,", ""),
        (
            "mask",
            "num_valid=None if all_rows else model.num_valid_tokens",
            "num_valid=None",
            (
                "tests/generate/test_policy.py::test_padding_of_random_weights_is_never_sampled",
                "tests/generate/test_policy.py::test_new_tags_grow_the_model_and_padding_is_never_sampled",
                "tests/generate/test_policy.py::test_the_probe_finds_float32_exact",
            ),
        ),
        (
            "order",
            "positions_N = positions_of(micro.segments, device)",
            "positions_N = torch.arange(len(micro.tokens_N))",
        ),
        (
            "mask",
            "Packed(micro.segments, device, attention, routing, split)",
            "Packed(micro.segments[:1], device, attention, routing, split)",
        ),
    ],
    ("tasks/read.py", ("tests/tasks/test_read.py", "tests/tasks/test_jsonl.py")): [
        ("bound", "place < test_percent + dev_percent", "place < dev_percent"),
        ("factor", "/ 2**32 * 100", "/ 2**31 * 100"),
        ("bound", "    if len(bad) > allowed:", "    if len(bad) >= allowed:"),
        ("guard", "    if not value.strip():", "    if not value:"),
        ("guard", 'if "\\x00" in value:', "if False:"),
        (
            "order",
            "for file in reversed(files) for problem in reversed(load(file))}",
            "for file in files for problem in load(file)}",
        ),
        (
            "choice",
            'return problems if split == "test" else select_split(problems, split, dev_percent=percent)',
            "return select_split(problems, split, dev_percent=percent)",
        ),
        ("bound", "if len(line) > MAX_LINE_BYTES:", "if False:"),
        ("choice", 'line.removeprefix(b"\\xef\\xbb\\xbf") if number == 1 else line', "line"),
        ("mask", "None not in row and None not in row.values()", "None not in row"),
        ("order", "numbered = enumerate(values, 1)", "numbered = enumerate(values)"),
        (
            "mask",
            "if split_of(uid, dev_percent=dev_percent, test_percent=test_percent) == split",
            "if split_of(uid, dev_percent=dev_percent, test_percent=0) == split",
        ),
        ("choice", 'problem.meta.get("prompt_uid", problem.uid)', "problem.uid"),
        ("guard", "    if not good:", "    if False:"),
    ],
    ("tasks/columns.py", ("tests/tasks/test_jsonl.py", "tests/tasks/test_hub.py")): [
        (
            "choice",
            "found, last = found[: places[-1]], found[places[-1]]",
            "found, last = found[:1], found[places[-1]]",
        ),
        ("choice", "prompt=users[-1]", "prompt=users[0]"),
        ("guard", "messages=messages if len(messages) > 1 else ()", "messages=()"),
        ("guard", 'if found[-1].role not in ("user", "tool"):', "if False:"),
        ("mask", "switch != (name in MASKED)", "switch"),
        ("mask", "places = [place for place in places if found[place].is_learnt]", "pass"),
        (
            "choice",
            "for name, inner in value.items() if inner is not None}",
            "for name, inner in value.items()}",
        ),
        ("choice", "extract_answer_with_step(rest, SAID)[0]", "extract_answer(rest)"),
        ("choice", "solution=(thinking or rest).strip()", "solution=str(solution).strip()"),
        ("guard", "if len(found) > 1 and found[0].lower() != option:", "if False:"),
        ("choice", "return None if is_number(value) else text_fault", "return text_fault"),
    ],
    ("tasks/jsonl.py", ("tests/tasks/test_jsonl.py", "tests/tasks/test_hub.py")): [
        ("guard", "for gold in problem.answers)", "for gold in problem.answers[:1])"),
        ("choice", "if all(lists):", "if any(lists):"),
        (
            "guard",
            "if not without or (len(without) <= num_tolerated",
            "if True or (len(without) <= num_tolerated",
        ),
        ("choice", "content.verbatim()) for number", "content) for number"),
        ("choice", "        if TEST in self._parts:", "        if False:"),
        (
            "choice",
            "problem_uid(self.name, content.key, names)",
            "problem_uid(self.name, content.prompt, names)",
        ),
    ],
    ("tasks/images.py", ("tests/tasks/test_image_columns.py",)): [
        ("guard", "path = locate(source, root=self._root)", "path = locate(source)"),
        ("guard", "        if MARK not in text:", "        if not self._waiting:"),
        ("guard", "if self._needs_all and PLACE.search(text)", "if self._needs_all"),
        ("bound", "if len(data) <= INLINE_BYTES:", "if True:"),
    ],
    ("model/vision/reading.py", ("tests/tasks/test_image_columns.py",)): [
        ("guard", "    if not is_whole:", "    if False:"),
    ],
    ("tasks/hub.py", ("tests/tasks/test_hub.py",)): [
        ("choice", "part.path, config or None, split=part.split", "part.path, None, split=part.split"),
        ("bound", "left = max_rows - count if max_rows else None", "left = None"),
        ("choice", "streaming=bool(max_rows)", "streaming=False"),
        ("guard", "if TRAIN not in found and len(names) > 1:", "if False:"),
    ],
    ("tasks/sets.py", ("tests/tasks/test_hub.py",)): [
        ("choice", 'configs=MATH_SUBJECTS) | _test("Hug', 'configs=MATH_SUBJECTS[:6]) | _test("Hug'),
        (
            "choice",
            "place < len(flags) and flags[place] for flags in (right, whole)",
            "place < len(flags) and flags[place] for flags in (whole,)",
        ),
        ("guard", "not in NO_ANSWER", "not in ()"),
        ("choice", ".removeprefix(DAPO_HEAD)", ""),
    ],
    ("tasks/ifeval.py", ("tests/tasks/test_ifeval.py",)): [
        (
            "bound",
            "return count < limit if relation == LESS else count >= limit",
            "return count < limit if relation == LESS else count > limit",
        ),
        ("guard", "if LANGUAGE not in row", "if True or LANGUAGE not in row"),
        (
            "choice",
            "return all(self.followed(problem, answer))",
            "return any(self.followed(problem, answer))",
        ),
    ],
    ("tasks/code.py", ("tests/tasks/test_code.py", "tests/tasks/test_hub.py")): [
        ("choice", "and same_output(verdict.stdout, expected)", ""),
        ("guard", "if len(texts) != 1 or not isinstance(texts[0], str):", "if False:"),
        ("guard", 'if results and results[-1].status == "tle":', "if False:"),
        (
            "bound",
            "unpacker.decompress(base64.b64decode(text, validate=True), MAX_UNPACKED)",
            "unpacker.decompress(base64.b64decode(text, validate=True))",
        ),
    ],
    ("editing/editor.py", (f"{EDITING}::test_drawdown_is_the_relative_rise",)): [
        ("sign", "after.perplexity / before.perplexity - 1", "1 - after.perplexity / before.perplexity"),
    ],
    ("editing/memory.py", (f"{EDITING}::test_project_is_the_published_formula_and_keeps_earlier_edits",)): [
        ("mask", "basis_FP = vectors[:, values > 0.5]", "basis_FP = vectors[:, values < 0.5]"),
        ("sign", "gram_FF = gram_FF + earlier_XF", "gram_FF = gram_FF - earlier_XF"),
    ],
    ("editing/memory.py", (f"{EDITING}::test_capped_shortens_only_what_is_too_long",)): [
        (
            "denominator",
            "(lengths_E / norms_E.clamp(min=1e-30)).clamp(max=1.0)",
            "(lengths_E / norms_E.clamp(min=1e-30))",
        ),
    ],
    ("editing/methods.py", (f"{EDITING}::test_changes_of_one_matrix_add_up",)): [
        (
            "order",
            "torch.cat([before.right_RF, delta.right_RF], 0)",
            "torch.cat([delta.right_RF, before.right_RF], 0)",
        ),
        (
            "denominator",
            "self.norms[memory.name] = float(dense.norm() / memory.matrix().norm())",
            "self.norms[memory.name] = float(dense.norm())",
        ),
    ],
    (
        "editing/methods.py",
        (f"{EDITING}::test_the_loss_of_facts_is_the_mean_over_facts_of_the_mean_over_tokens",),
    ): [
        ("denominator", "1 / (len(one.targets) * len(facts))", "1 / len(one.targets)"),
    ],
    ("editing/methods.py", (f"{EDITING}::test_a_bound_holds_on_both_sides",)): [
        ("bound", ".clamp(-bound, bound)", ".clamp(max=bound)"),
    ],
    ("editing/methods.py", (f"{EDITING}::test_one_by_one_gives_each_key_the_value_that_was_searched",)): [
        (
            "order",
            "rank_one(value_D - present_D, mean_F, own_F,",
            "rank_one(value_D - present_D, own_F, mean_F,",
        ),
    ],
    ("editing/record.py", (f"{EDITING}::test_originals_are_those_of_before_the_first_batch",)): [
        ("guard", "            if name not in self.originals:", "            if True:"),
    ],
    ("editing/record.py", (f"{EDITING}::test_keys_of_earlier_facts_are_those_that_were_written_last",)): [
        ("order", "torch.cat(parts[::-1])", "torch.cat(parts)"),
        ("guard", "seen |= {comparable(fact.text) for fact in batch.facts}", "pass"),
    ],
    ("editing/record.py", (f"{EDITING}::test_a_model_that_is_not_the_records_is_refused",)): [
        ("choice", "if expected not in digests_of(model):", "if False:"),
    ],
    ("editing/statistics.py", (f"{EDITING}::test_statistics_go_on_behind_the_last_saved_window",)): [
        ("order", "rows = windows[done:]", "rows = windows"),
    ],
    ("editing/targets.py", (f"{EDITING}::test_targets_are_those_of_adam_on_the_same_loss",)): [
        (
            "factor",
            "first[keep] = 0.9 * first[keep] + 0.1 * moving",
            "first[keep] = 0.9 * first[keep] + moving",
        ),
        ("denominator", "lengths_E[at].clamp(min=1e-12).square()", "lengths_E[at].clamp(min=1e-12)"),
        ("bound", "settings.clamp * lengths_E[keep])", "2 * settings.clamp * lengths_E[keep])"),
    ],
    ("editing/targets.py", (f"{EDITING}::test_a_search_ends_where_a_fact_is_sure_enough",)): [
        ("mask", "going = loss.detach() >= settings.stop_loss", "going = loss.detach() >= -1.0"),
    ],
    (
        "editing/trace.py",
        (f"{EDITING}::test_tracing_is_the_mean_of_what_restoring_brings_back_over_what_noise_takes",),
    ): [
        (
            "sign",
            "batch.groups] = found - self.corrupted",
            "batch.groups] = found + self.corrupted",
        ),
        ("denominator", "total /= max(1, len(facts))", "total /= 1"),
        (
            "factor",
            "spread = noise * float(first[0].float().std())",
            "spread = float(first[0].float().std())",
        ),
    ],
    ("generate/cache.py", (f"{ENGINE}::test_a_set_belongs_to_its_token_however_rows_end_and_move",)): [
        ("mask", "has_rest = shared_B < length_B", "has_rest = shared_B > length_B"),
    ],
    ("generate/cache.py", (f"{ENGINE}::test_a_sequence_does_not_depend_on_its_batch",)): [
        ("guard", "self._slots[slot].num_rows -= 1", "self._slots[slot].num_rows -= 0"),
    ],
    ("generate/cache.py", (f"{ENGINE}::test_what_a_row_remembers_without_keys_moves_with_it",)): [
        ("choice", "tensor[to_rows] = tensor[from_rows]", "pass"),
    ],
    ("generate/cache.py", (f"{ENGINE}::test_lengths_end_at_the_limit_and_at_the_context",)): [
        (
            "mask",
            "hidden = outside(key, self._positions[:, None], window)",
            "hidden = outside(key, self._positions[:, None] + 1, window)",
        ),
    ],
    ("generate/engine.py", (f"{ENGINE}::test_prompts_that_cannot_be_answered",)): [
        ("bound", "if len(prompt_ids) >= context:", "if len(prompt_ids) > context:"),
    ],
    ("generate/engine.py", (f"{ENGINE}::test_long_admissions_are_cut_into_chunks",)): [
        (
            "bound",
            "if prompts and tokens + len(request.prompt_ids) > PREFILL_TOKENS:",
            "if prompts and tokens > PREFILL_TOKENS:",
        ),
    ],
    ("generate/engine.py", (f"{ENGINE}::test_a_set_belongs_to_its_token_however_rows_end_and_move",)): [
        (
            "order",
            "torch.tensor(lengths, device=self.device).cumsum(0) - 1",
            "torch.tensor(lengths, device=self.device).cumsum(0) - 2",
        ),
        (
            "order",
            "torch.tensor(lengths, device=self.device).repeat_interleave(repeats) - 1",
            "torch.tensor(lengths, device=self.device).repeat_interleave(repeats)",
        ),
        (
            "order",
            "movers = [row for row in range(kept, live) if not done[row]]",
            "movers = [row for row in range(kept, live)]",
        ),
        ("choice", 'finish_reason="stop" if stopped[row] else "length",', 'finish_reason="stop",'),
    ],
    ("generate/engine.py", (f"{ENGINE}::test_stop_strings_cut_at_the_completing_token",)): [
        (
            "guard",
            "for flags in (state.counts, state.checked, state.done, state.stopped):",
            "for flags in (state.counts, state.done, state.stopped):",
        ),
        ("bound", "checked[row] - job.tail)", "checked[row])"),
    ],
    ("generate/engine.py", (f"{ENGINE}::test_lengths_end_at_the_limit_and_at_the_context",)): [
        (
            "bound",
            "self.model.config.max_positions - length)",
            "self.model.config.max_positions - length + 1)",
        ),
        (
            "bound",
            "num_keys = min(round_up(deepest + 1, KEY_QUANTUM), self._cache.capacity)",
            "num_keys = min(round_up(deepest, KEY_QUANTUM), self._cache.capacity)",
        ),
    ],
    ("generate/engine.py", (f"{ENGINE}::test_stop_ids_stay_in_the_output",)): [
        ("mask", "logprobs=tuple(row_logprobs[:count]),", "logprobs=tuple(row_logprobs[: count + 1]),"),
    ],
    ("generate/engine.py", (f"{ENGINE}::test_scores_are_the_trainers_whatever_the_pieces",)): [
        (
            "order",
            "scored = range(first + 1, min(reading.num_read, len(ids) - 1) + 1)",
            "scored = range(first, min(reading.num_read, len(ids) - 1))",
        ),
        ("bound", "min(reading.num_read, len(ids) - 1) + 1)", "min(reading.num_read, len(ids) - 1))"),
    ],
    ("generate/engine.py", (f"{ENGINE}::test_an_engine_follows_its_model_to_another_precision",)): [
        ("choice", "or cache.keys.dtype != dtype:", ":"),
    ],
    ("generate/probe.py", (f"{REINFORCING}::test_limits_of_what_may_part_sampler_and_trainer",)): [
        ("bound", "GAP_LIMIT = 0.1", "GAP_LIMIT = 10.0"),
    ],
    ("generate/rows.py", (f"{ENGINE}::test_a_row_that_ended_is_drawn_for_without_effect",)): [
        (
            "mask",
            "column = torch.where(live, counts, self.tokens.shape[1] - 1)[:, None]",
            "column = counts[:, None].clamp(max=self.tokens.shape[1] - 1)",
        ),
        (
            "mask",
            "stopped = torch.isin(tokens_B, stop_ids) & live",
            "stopped = torch.isin(tokens_B, stop_ids)",
        ),
        ("bound", "done |= counts >= self.limits[rows]", "done |= counts > self.limits[rows]"),
    ],
    (
        "generate/sampling.py",
        ("tests/generate/test_sampling.py::test_a_nucleus_ends_where_its_probability_is_reached",),
    ): [
        ("bound", "(before < top_p)", "(before <= top_p)"),
    ],
    (
        "model/lora/merge.py",
        ("tests/model/test_merging.py::test_numbers_whose_sum_is_0_are_elected_as_positive",),
    ): [
        ("bound", "stacked.sum(dim=0) >= 0, 1, -1", "stacked.sum(dim=0) > 0, 1, -1"),
    ],
    (
        "rewards/answers/identity.py",
        ("tests/rewards/test_symbolic.py::test_expressions_are_equal_only_where_enough_points_agree",),
    ): [
        ("bound", "return num_agreeing >= MIN_POINTS", "return num_agreeing > 0"),
    ],
    (
        "rewards/answers/units.py",
        (
            "tests/rewards/test_symbolic.py::test_units_conflict_where_both_are_there_and_name_different_things",
        ),
    ): [
        ("choice", "or any(side <= _GENERIC for side in (words, others))", ""),
    ],
    ("serve/api.py", ("tests/serve/test_serve.py::test_the_scheduler_knows_which_requests_are_streams",)): [
        ("choice", "streams=asked.stream", "streams=False"),
    ],
    (
        "serve/api.py",
        ("tests/serve/test_serve.py::test_a_prompt_that_is_echoed_and_continued_is_read_once",),
    ): [
        ("choice", "            if self._asked.generate:", "            if False:"),
    ],
    ("serve/scheduler.py", (f"{SERVING}::test_who_waits_gets_what_the_engine_gives",)): [
        ("bound", "if len(prompt_ids) + room > self.context:", "if len(prompt_ids) > self.context:"),
    ],
    ("serve/scheduler.py", (f"{SERVING}::test_the_queue_is_bounded_and_cancelling_makes_room",)): [
        (
            "bound",
            "if self.num_pending + count > self.max_completions:",
            "if self.num_pending > self.max_completions:",
        ),
    ],
    ("serve/scheduler.py", (f"{SERVING}::test_what_a_request_becomes_as_a_job",)): [
        ("bound", "self.context - len(ask.request.prompt_ids))", "self.context)"),
        (
            "choice",
            "records = ask.records and params.is_filtered and params.temperature > 0",
            "records = ask.records and params.temperature > 0",
        ),
    ],
    ("serve/scheduler.py", (f"{SERVING}::test_a_cancelled_row_is_free_and_the_others_go_on",)): [
        ("guard", "or event is None or job.cancelled:", "or event is None:"),
    ],
    ("serve/scheduler.py", (f"{SERVING}::test_decoding_has_its_share_of_the_time",)): [
        ("bound", "self._owed_s = (perf_counter() - began) / share", "self._owed_s = 1e-9"),
    ],
    ("serve/scheduler.py", (f"{SERVING}::test_a_stream_keeps_a_third_of_its_pace",)): [
        ("bound", "most = min(most, self._pace.most_rows)", "most = self._max_rows"),
        ("bound", "return self._pace.piece_tokens if", "return PIECE_TOKENS if"),
    ],
    ("serve/stream.py", (f"{SERVING}::test_tokens_that_end_a_completion_are_no_text",)): [
        ("mask", "if index in self._silent_ids:", "if False:"),
    ],
    ("serve/stream.py", (f"{SERVING}::test_stop_strings_are_cut_and_their_beginnings_held",)): [
        (
            "bound",
            "min(len(text), max(map(len, marks), default=1) - 1)",
            "min(len(text), max(map(len, marks), default=1) - 2)",
        ),
    ],
    ("serve/stream.py", (f"{SERVING}::test_of_several_stop_strings_the_first_in_the_text_cuts",)): [
        (
            "choice",
            "cut = min(found) if found else len(text) - held(text, self._stops)",
            "cut = max(found) if found else len(text) - held(text, self._stops)",
        ),
    ],
    ("serve/stream.py", (f"{SERVING}::test_a_response_thinks_once",)): [
        (
            "guard",
            "self._may_think = self._may_think and not self.is_thinking",
            "self._may_think = self._may_think",
        ),
    ],
    ("serve/stream.py", (f"{SERVING}::test_broken_bytes_are_the_same_as_decoded_at_once",)): [
        ("order", "self._shown -= num_chars", "self._shown = 0"),
    ],
    ("serve/stream.py", (f"{SERVING}::test_byte_fallback_tokens_become_characters",)): [
        ("bound", "for _ in range(HELD_TOKENS - 1):", "for _ in range(HELD_TOKENS - 2):"),
    ],
    (
        "storage/checkpoint.py",
        (f"{CHECKPOINTS}::test_logs_are_hashed_as_they_are_and_only_what_is_new_is_read",),
    ): [
        (
            "bound",
            "if path.stat().st_size < size:  # somebody truncated it",
            "if False:  # somebody truncated it",
        ),
        ("order", "file.seek(size)", "file.seek(0)"),
    ],
    ("storage/checkpoint.py", (f"{CHECKPOINTS}::test_the_newest_are_kept",)): [
        ("bound", "oldest = saved[-max(keep, 2) :][0]", "oldest = saved[-max(keep, 1) :][0]"),
        ("bound", "        if old < oldest:", "        if old <= oldest:"),
    ],
    ("storage/checkpoint.py", (f"{CHECKPOINTS}::test_records_are_kept_for_the_checkpoints_that_are",)): [
        ("bound", "1 < int(record.name[5:]) <= oldest:", "1 < int(record.name[5:]) < oldest:"),
    ],
    (
        "storage/checkpoint.py",
        (f"{CHECKPOINTS}::test_a_log_that_was_changed_is_kept_as_found_and_told_of",),
    ): [
        (
            "guard",
            'if not path.is_file() or digest(path, entry["size"]) != entry["sha256"]:',
            "if not path.is_file():",
        ),
    ],
    (
        "storage/checkpoint.py",
        (f"{CHECKPOINTS}::test_a_checkpoint_under_another_steps_name_is_not_that_step",),
    ): [
        ("order", "for found in reversed(_steps(run)):", "for found in _steps(run):"),
        ("guard", 'if step_folder(folder.parent.parent, int(state["step"])) != folder:', "if False:"),
    ],
    ("storage/checkpoint.py", (f"{CHECKPOINTS}::test_steps_after_the_one_that_is_named_are_set_aside",)): [
        ("bound", "        if later > step:", "        if later >= step + 2:"),
    ],
    ("storage/checkpoint.py", (f"{CHECKPOINTS}::test_a_tensor_of_which_a_part_is_missing_is_refused",)): [
        (
            "mask",
            "if (shape, dtype, numbers) != (tensor.shape, tensor.dtype, tensor.numel()):",
            "if (shape, dtype) != (tensor.shape, tensor.dtype):",
        ),
    ],
    ("storage/checkpoint.py", (f"{CHECKPOINTS}::test_the_threads_of_a_checkpoint_are_taken",)): [
        ("choice", "torch.set_num_threads(threads)", "pass"),
    ],
    ("storage/checkpoint.py", (f"{CHECKPOINTS}::test_a_tensor_that_is_not_finite_is_not_saved",)): [
        ("guard", "if name := not_finite(tensors):", 'if name := "":'),
    ],
    ("storage/commit.py", (f"{CHECKPOINTS}::test_a_folder_without_files_is_no_checkpoint",)): [
        ("guard", "if not is_whole or not expected:", "if not is_whole:"),
    ],
    ("storage/commit.py", (f"{CHECKPOINTS}::test_damage_is_noticed_and_the_checkpoint_before_is_used",)): [
        (
            "choice",
            "if path.stat().st_size != size or digest(path) != written:",
            "if path.stat().st_size != size:",
        ),
    ],
    ("storage/commit.py", (f"{CHECKPOINTS}::test_a_new_folder_is_whole_or_not_there",)): [
        ("guard", "if number.isdecimal() and not psutil.pid_exists(int(number)):", "if number.isdecimal():"),
    ],
    ("storage/commit.py", (f"{CHECKPOINTS}::test_a_digest_of_a_part_is_that_of_its_bytes",)): [
        ("bound", "size -= len(data)", "size -= 0"),
    ],
    ("storage/commit.py", (f"{CHECKPOINTS}::test_what_a_manifest_does_not_say_is_noticed",)): [
        (
            "guard",
            'is_whole = manifest.pop("sha256", None) in (None, _seal(manifest))',
            'is_whole = manifest.pop("sha256", None) != ""',
        ),
        ("guard", "if unnamed := sorted(found - expected.keys()):", "if unnamed := sorted(found - found):"),
    ],
    (
        "storage/folder.py",
        (f"{CHECKPOINTS}::test_a_config_that_was_edited_is_refused_even_where_it_may_differ",),
    ): [
        ("guard", "if not is_whole and essential != essential_hash(config_yaml):", "if False:"),
    ],
    ("storage/folder.py", (f"{CHECKPOINTS}::test_a_folder_that_cannot_be_made_is_found_before_the_run",)): [
        ("guard", 'os.rmdir(tempfile.mkdtemp(prefix=".whet-", dir=nearest))', "pass"),
    ],
    ("storage/folder.py", (f"{CHECKPOINTS}::test_open_run",)): [
        ("choice", 'return "" if len(stored) == len(given) else "the number of fields differs"', 'return ""'),
    ],
    (
        "train/objective/advantage.py",
        (f"{OBJECTIVE}::test_whitening_scales_what_a_critic_makes_of_equal_outcomes",),
    ): [
        ("guard", 'scale=not (is_flat and algo.baseline != "value")', "scale=not is_flat"),
    ],
    ("train/rl.py", (f"{REINFORCING}::test_limits_of_what_may_part_sampler_and_trainer",)): [
        ("guard", 'and not values.get("rl/token_age")', ""),
        ("guard", 'is_fresh = values["rl/staleness"] == 0 and', "is_fresh ="),
        (
            "bound",
            "and gap > max(STALE_GAP, STALE_FACTOR * first)",
            "and gap > max(STALE_GAP, 100 * STALE_FACTOR * first)",
        ),
    ],
    ("train/rl.py", (f"{REINFORCING}::test_a_kl_above_its_limit_stops_the_run",)): [
        ("bound", "if limit is not None and kl > limit:", "if limit is not None and kl > 10 * limit:"),
    ],
    (
        "train/rl.py",
        (f"{REINFORCING}::test_rewards_that_fail_are_told_of_at_the_first_and_at_every_doubling",),
    ): [
        (
            "bound",
            "if count >= max(1, 2 * self._shown[name])",
            "if count > max(1, 2 * self._shown[name])",
        ),
        ("choice", "self._shown[name] = count", "pass"),
    ],
    ("train/rl.py", (f"{REINFORCING}::test_hot_sampling_is_warned_of",)): [
        ("bound", "if temperature <= HOT:", "if temperature < HOT:"),
    ],
    ("train/rl.py", (f"{REINFORCING}::test_steps_without_a_signal_count_only_in_a_row",)): [
        (
            "guard",
            'if self.dead_steps >= self._config.max_dead_steps and values["rl/correct"] < SOLVED:',
            "if self.dead_steps >= self._config.max_dead_steps:",
        ),
        ("choice", 'self.dead_steps = int(state["dead_steps"])', "self.dead_steps = 0"),
        (
            "guard",
            'self.dead_steps = self.dead_steps + 1 if values["rl/groups_with_signal"] == 0 else 0',
            'self.dead_steps += int(values["rl/groups_with_signal"] == 0)',
        ),
    ],
    (
        "train/rl.py",
        ("tests/train/test_episodes.py::test_what_a_reward_cannot_score_is_left_out_and_counted",),
    ): [
        (
            "choice",
            "                        run.warn(line)",
            "                        run.display.note(line)",
        ),
    ],
    ("train/rl.py", (f"{REINFORCING}::test_resume_is_exact",)): [
        ("choice", 'source.load_state(saved[1]["source"])', "pass"),
        ("choice", 'objective.load(saved[0], saved[1]["objective"])', "pass"),
    ],
    ("train/rl.py", (f"{REINFORCING}::test_the_rest_of_a_step_is_what_the_loss_does_not_use",)): [
        ("mask", "for place, group in groups if place not in collected.used]", "for place, group in groups]"),
    ],
    ("train/rl.py", (f"{REINFORCING}::test_staleness_is_how_many_steps_ago_it_was_sampled",)): [
        (
            "sign",
            'values["rl/staleness"] = float(step - collected.step)',
            'values["rl/staleness"] = float(collected.step - step)',
        ),
    ],
    ("train/rl.py", (f"{REINFORCING}::test_speed_divides_tokens_by_the_time_that_made_them",)): [
        (
            "denominator",
            '"rl/train_tokens_per_second": objective.num_tokens_read / trained,',
            '"rl/train_tokens_per_second": objective.num_tokens_read / (done - began),',
        ),
    ],
    ("train/run.py", (f"{SESSION}::test_the_best_is_the_best_finite_value_so_far",)): [
        (
            "bound",
            "self._best_name, self._sign = best, -1.0 if higher_is_better else 1.0",
            "self._best_name, self._sign = best, 1.0",
        ),
        ("guard", "math.isfinite(score) and (self.best is None", "True and (self.best is None"),
        ("sign", "self._sign * (score - self.best) < 0", "self._sign * (score - self.best) > 0"),
    ],
    ("train/run.py", (f"{SESSION}::test_an_overflow_is_a_skip_that_is_reported_once",)): [
        (
            "choice",
            "return self._skipped.count > 0 or self._num_overflows > 0",
            "return self._skipped.count > 0",
        ),
        (
            "guard",
            "self._num_overflows, self.optimizer.num_overflows = self.optimizer.num_overflows, 0",
            "self._num_overflows = self.optimizer.num_overflows",
        ),
    ],
    ("train/run.py", (f"{SESSION}::test_a_run_takes_up_what_its_checkpoint_says",)): [
        ("choice", 'self.step = self._saved = int(state["step"])', 'self.step = int(state["step"])'),
        ("guard", 'self._skipped.count = int(state.get("skipped", 0))', "self._skipped.count = 0"),
        ("choice", 'self.last = dict(state["last"])', "self.last = {}"),
        ("order", "self.optimizer.load_tensors(saved)", "pass"),
        (
            "bound",
            "past_rows(self._folder, self.stage, self.step)[-HISTORY_ROWS:]",
            "past_rows(self._folder, self.stage, self.step)[:0]",
        ),
        ("choice", 'self.best = None if state["best"] is None else float(state["best"])', "self.best = None"),
    ],
    ("train/run.py", (f"{SESSION}::test_a_part_of_a_step_that_is_given_up_saves_the_step_before_once",)): [
        ("bound", "if self.step > self._saved:", "if self.step >= self._saved:"),
    ],
    ("train/run.py", (f"{SESSION}::test_where_a_run_stands",)): [
        ("bound", "return self.step % every == 0 or self.step == self._end", "return self.step % every == 0"),
        (
            "denominator",
            "return self.step / max(1, self._config.num_steps - 1)",
            "return self.step / max(1, self._config.num_steps)",
        ),
    ],
    (
        "train/run.py",
        (f"{SESSION}::test_steps_are_saved_where_due_and_at_the_end_with_all_that_training_goes_on_from",),
    ): [
        (
            "choice",
            "is_due = self.session.is_due(self.step) or self.step == self._end",
            "is_due = self.session.is_due(self.step)",
        ),
        (
            "choice",
            'own = {"best": self.best, "last": self.last, "skipped": self._skipped.count, "idle": self._num_idle}',
            'own = {"best": self.best, "last": self.last, "skipped": 0, "idle": self._num_idle}',
        ),
        (
            "order",
            "return {**self.optimizer.tensors(), **tensors}, {**state, **own}",
            "return dict(tensors), {**state, **own}",
        ),
    ],
    (
        "train/session.py",
        ("tests/train/test_lora.py::test_training_that_merges_an_adapter_says_how_it_goes_on",),
    ): [
        (
            "guard",
            "if policy.adapter is not None and not config.lora.rank",
            "if False",
        ),
    ],
    ("train/session.py", (f"{SESSION}::test_when_a_session_saves",)): [
        (
            "bound",
            "is_time = 0 < self._config.save_minutes <= minutes",
            "is_time = 0 < self._config.save_minutes < -minutes",
        ),
        (
            "bound",
            "return bool(wish) or step % self._save_every == 0 or step == self._num_steps",
            "return bool(wish) or step % self._save_every == 0",
        ),
        ("choice", "self._stop = int(wish)  # a signal", "self._stop = 0  # a signal"),
        ("guard", "raise Stopped(128 + self._stop)", "raise Stopped(0)"),
    ],
    (
        "train/session.py",
        (f"{SESSION}::test_a_best_policy_is_saved_without_a_checkpoint_and_inputs_with_one",),
    ): [
        ("choice", "if not (is_best or training):", "if not training:"),
        ("guard", "if name := not_finite(own):", "if False and (name := not_finite(own)):"),
        ("guard", 'text = json.dumps({**state, "inputs": self._inputs})', "text = json.dumps({**state})"),
    ],
    ("train/session.py", (f"{SESSION}::test_a_full_disk_ends_the_last_save_whatever_was_said",)): [
        ("bound", "if free < size + (1 << 20):", "if free < -1:"),
        ("choice", 'if is_last or self._config.disk_full == "stop":', 'if self._config.disk_full == "stop":'),
    ],
    ("train/session.py", (f"{SESSION}::test_steps_that_are_left_out_count_in_a_row_up_to_the_limit",)): [
        (
            "choice",
            'self.count, self._found = (self.count + 1 if bad else 0), ", ".join(bad)',
            'self.count, self._found = self.count + bool(bad), ", ".join(bad)',
        ),
        ("bound", "if self.count > self._limit:", "if self.count >= self._limit:"),
    ],
    ("train/session.py", (f"{SESSION}::test_what_is_written_in_the_background_is_what_it_was",)): [
        (
            "choice",
            'tensor.detach().to("cpu", copy=self._config.background) for name',
            'tensor.detach().to("cpu") for name',
        ),
    ],
    ("train/session.py", (f"{SESSION}::test_what_went_wrong_in_the_background_is_raised_once",)): [
        ("guard", "error, self._error = self._error, None", "error = self._error"),
    ],
    ("train/session.py", (f"{SESSION}::test_a_second_signal_after_a_moment_ends_the_process",)): [
        (
            "bound",
            "if now - self._signalled_at < DOUBLE_S[is_distributed()]:",
            "if now - self._signalled_at < 60 * DOUBLE_S[is_distributed()]:",
        ),
    ],
}
"""(File, its tests) -> rows."""


def mutants() -> list[Mutant]:
    """Return the rows of the table."""
    return [
        Mutant(row[0], file, row[1], row[2], row[3] if len(row) == 4 else tests)
        for (file, tests), rows in TABLE.items()
        for row in rows
    ]


def fault(mutant: Mutant, package: Path = ROOT / PACKAGE) -> str | None:
    """Say what is wrong with a row; None where it applies to the source."""
    path = package / mutant.file
    if mutant.kind not in KINDS:
        return f"kind {mutant.kind!r}, expected one of {', '.join(KINDS)}"
    if mutant.old == mutant.new or "\n" in mutant.old + mutant.new:
        return "expected one line that changes"
    if not path.is_file():
        return f"no file {PACKAGE}/{mutant.file}"
    text = _text(path)
    if text.count(mutant.old) != 1:
        return f"the old text stands there {text.count(mutant.old)} times, expected once"
    line = text.count("\n", 0, text.index(mutant.old)) + 1
    try:
        ast.parse(_statement(path, line).replace(mutant.old, mutant.new))
    except SyntaxError as error:  # any test would notice that
        return f"the new text is no Python ({error.msg})"
    lost = next((test for test in mutant.tests if not _exists(test)), None)
    return None if lost is None else f"no test {lost}"


def _exists(test: str) -> bool:
    file, _, name = test.partition("::")
    path = ROOT / file
    return path.is_file() and f"def {name.partition('[')[0]}" in _text(path)


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def _starts(path: Path) -> list[int]:
    """Return the first lines of a module's statements, with their decorators."""
    nodes = ast.parse(_text(path)).body
    return [min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))]) for node in nodes]


def _statement(path: Path, line: int) -> str:
    """Return the statement of a module that a line is in: a whole module takes ten times as long to parse."""
    starts = _starts(path)
    place = bisect_right(starts, line)
    lines = _text(path).splitlines(keepends=True)
    first = starts[place - 1] if place else 1
    return "".join(lines[first - 1 : starts[place] - 1 if place < len(starts) else None])


class Copy:
    """A temporary copy of package and tests, in which one line at a time is changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._clock = int(time.time())
        for part in (PACKAGE, "tests", "docs"):
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy2(ROOT / "pyproject.toml", folder)

    def change(self, mutant: Mutant) -> None:
        """Write a mutant."""
        path = self.folder / PACKAGE / mutant.file
        path.write_text(path.read_text(encoding="utf-8").replace(mutant.old, mutant.new), encoding="utf-8")
        # Python takes bytecode for current by size and whole seconds: no two versions of a file may have one time.
        self._clock += 10
        os.utime(path, (self._clock, self._clock))

    def restore(self, mutant: Mutant) -> None:
        """Undo `change`."""
        shutil.copy2(ROOT / PACKAGE / mutant.file, self.folder / PACKAGE / mutant.file)
        shutil.rmtree(self.folder / ".hypothesis", ignore_errors=True)

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which every process imports this copy, wherever it is started."""
        return os.environ | {"PYTHONPATH": os.pathsep.join([str(self.folder), str(self.folder / "tests")])}

    def check_import(self) -> None:
        """Make sure that another process, in another folder, imports the copy."""
        code = f"import {PACKAGE}; print({PACKAGE}.__file__)"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd="/",
            env=self.environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert Path(done.stdout.strip()).is_relative_to(self.folder), done.stdout


class Run:
    """The tests of one mutant in a forked process, which has the large libraries already but not whet."""

    def __init__(self, copy: Copy, tests: Sequence[str]) -> None:
        self.copy, self.start = copy, time.monotonic()
        self.log = copy.folder / "output.txt"
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(_run_tests(copy, tests, self.log))

    def poll(self) -> int | None:
        """Return pytest's exit status, -1 after a time-out, or None while it runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
        elif time.monotonic() - self.start > TIMEOUT_S:
            code = -1
        else:
            return None
        self.kill(reap=not pid)
        return code

    def kill(self, *, reap: bool = True) -> None:
        """End the process and whatever it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if reap:
            os.waitpid(self.pid, 0)

    def output(self) -> str:
        """Return the last lines of what the tests wrote."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])


def _run_tests(copy: Copy, tests: Sequence[str], log: Path) -> int:
    """Be the forked process: turn into a pytest that was started in the copy."""
    code: int = 99
    try:
        os.setsid()
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.chdir(copy.folder)
        os.environ |= copy.environment
        sys.path[0] = str(copy.folder)  # instead of the folder of this program
        sys.argv[0] = "pytest"
        import pytest

        import whet

        assert Path(whet.__file__).is_relative_to(copy.folder), whet.__file__
        code = int(pytest.main([*OPTIONS, *tests]))
    except BaseException as error:
        print(f"{type(error).__name__}: {error}")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def run_all(
    jobs: Sequence[tuple[Mutant | None, Sequence[str]]], copies: Sequence[Copy]
) -> Iterator[tuple[int, Any]]:
    """Run tests, one lot in each copy at a time.

    Args:
        jobs: What is changed (None for nothing), and the tests.
        copies: Where.

    Yields:
        Index of the job that ended, and (exit status, seconds, last lines of its output).
    """
    waiting = list(enumerate(jobs))[::-1]
    running: dict[int, Run] = {}
    free = list(copies)
    try:
        while waiting or running:
            while waiting and free:
                index, (mutant, tests) = waiting.pop()
                copy = free.pop()
                if mutant is not None:
                    copy.change(mutant)
                running[index] = Run(copy, tests)
            time.sleep(0.05)
            for index, run in list(running.items()):
                code = run.poll()
                if code is None:
                    continue
                del running[index]
                mutant = jobs[index][0]
                if mutant is not None:
                    run.copy.restore(mutant)
                free.append(run.copy)
                yield index, (code, time.monotonic() - run.start, run.output())
    finally:
        for run in running.values():
            run.kill()


def preload() -> None:
    """Import what takes long and is not tested, so that each fork has it."""
    import hypothesis  # noqa: F401
    import numpy as np  # noqa: F401
    import pytest  # noqa: F401
    import torch  # noqa: F401

    assert PACKAGE not in sys.modules


def check(chosen: Sequence[Mutant], num_jobs: int) -> int:
    """Run the mutants; return the exit status."""
    preload()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="whet-mutants-") as place:
        copies = [Copy(Path(place).resolve() / str(number)) for number in range(num_jobs)]
        copies[0].check_import()
        if not passes_unchanged(chosen, copies):
            return 1
        outcomes: Counter[str] = Counter()
        survivors: list[Mutant] = []
        for index, (code, seconds, output) in run_all([(m, m.tests) for m in chosen], copies):
            mutant = chosen[index]
            # 1: a test failed; 2: a module could not even be imported; a hang is noticed, too.
            word = {1: "caught", 2: "caught", -1: "caught (hangs)", 0: "SURVIVED"}.get(code, "ERROR")
            outcomes[word] += 1
            if word == "SURVIVED":
                survivors.append(mutant)
            print(f"{word:9} {seconds:5.1f} s  {mutant.name}", flush=True)
            if word == "ERROR":
                print(f"pytest ended with {code}:\n{output}", flush=True)
    share = 1 - (len(survivors) + outcomes["ERROR"]) / len(chosen)
    minutes = (time.monotonic() - started) / 60
    print(
        f"\n{len(chosen)} mutants, {100 * share:.1f} % caught, {len(survivors)} survived, {minutes:.0f} min"
    )
    grave = [mutant for mutant in survivors if mutant.kind in NEVER_SURVIVES]
    for mutant in grave:
        print(f"must be caught: {mutant.name}")
    return int(share < WANTED_SHARE or bool(grave) or outcomes["ERROR"] > 0)


def passes_unchanged(chosen: Sequence[Mutant], copies: Sequence[Copy]) -> bool:
    """Run all tests of these mutants on the unchanged copies, a file at a time; say which fail."""
    by_file: dict[str, set[str]] = {}
    for test in {test for mutant in chosen for test in mutant.tests}:
        by_file.setdefault(test.partition("::")[0], set()).add(test)
    # A whole file includes its tests.
    lots = [[file] if file in tests else sorted(tests) for file, tests in sorted(by_file.items())]
    fine = True
    for index, (code, seconds, output) in run_all([(None, lot) for lot in lots], copies):
        print(
            f"{'passes' if code == 0 else 'FAILS':9} {seconds:5.1f} s  {' '.join(lots[index])} (unchanged)",
            flush=True,
        )
        if code:
            fine = False
            print(f"{output}\na test that fails without a mutant catches nothing: repair it, or name others")
    return fine


def main() -> int:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="rows whose file, kind or text contains this"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="mutants at a time")
    parser.add_argument("--list", action="store_true", help="show the rows and run nothing")
    options = parser.parse_args()
    chosen = [mutant for mutant in mutants() if options.only in mutant.name]
    stale = [(mutant, reason) for mutant in chosen if (reason := fault(mutant))]
    for mutant, reason in stale:
        print(f"stale: {mutant.name} ({reason})")
    if stale or not chosen:
        print(f"{len(stale)} of {len(chosen)} rows do not apply to the source; nothing was run")
        return 1
    if options.list:
        for mutant in chosen:
            print(mutant.name)
        print(f"{len(chosen)} mutants: {dict(Counter(mutant.kind for mutant in chosen))}")
        return 0
    return check(chosen, max(1, options.jobs))


if __name__ == "__main__":
    sys.exit(main())
