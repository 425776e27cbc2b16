"""The data sets of the hub that have a name here: where they are, what their columns mean, and which rows are used.

Names of data sets, configurations, splits and columns are those of the published cards and of the libraries that load
them; `card` says where they were read. The few rows in tests/golden/hub have the same schema.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from whet.schema import AnswerType
from whet.tasks.columns import NONE, split_thinking
from whet.tasks.hub import TEST, TRAIN, Part
from whet.tasks.read import Row

MATH_SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)
NO_ANSWER = ("", "proof", "notfound")
"""What NuminaMath and its descendants write where a problem has no answer that could be compared."""
DAPO_HEAD = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem."
)
DAPO_TAIL = 'Remember to put your answer on its own line after "Answer:".'


@dataclass(frozen=True, kw_only=True, slots=True)
class HubSet:
    """One data set.

    Attributes:
        about: What is asked, and what the answer is.
        licence: As on its card; parts of a mixture may have others.
        card: Where its names were read: 'card' (its page on the hub), or the library whose source loads it.
        parts: Rows of the hub by our splits; without 'test' the part 'train' is split by hash.
        prompt: Column of the question; '' is recognised.
        answer: Column of the answer; 'none' learns replies as they are.
        solution: Column of the worked solution.
        images: Column of the images; '' is recognised.
        answer_type: What an answer is; it words the instruction.
        prepare: Brings a row into these columns; None for a row that is not used.
        max_rows: Rows that are streamed unless another number is given; 0 downloads all.
    """

    about: str
    licence: str
    card: str
    parts: Mapping[str, Part]
    prompt: str = ""
    answer: str = ""
    solution: str = ""
    images: str = ""
    answer_type: AnswerType = "text"
    prepare: Callable[[Row], Row | None] | None = field(default=None)
    max_rows: int = 0

    @property
    def path(self) -> str:
        """Name of the data set."""
        return next(iter(self.parts.values())).path


def _dapo(row: Row) -> Row:
    """Take DAPO's instruction off the question: the schema has its own."""
    prompt: Any = row.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], Mapping):
        text = prompt[0].get("content")
        if isinstance(text, str):
            text = text.strip().removeprefix(DAPO_HEAD).removesuffix(DAPO_TAIL).strip()
            return {**row, "prompt": text}
    return row


def _numina(row: Row) -> Row | None:
    """Leave out proofs, problems without an answer, and those that its authors marked as not valid."""
    valid = (row.get(name) in (None, "Yes") for name in ("problem_is_valid", "solution_is_valid"))
    return row if _has_answer(row, "answer") and all(valid) else None


def _openr1(row: Row) -> Row | None:
    """Take the reasoning of the first generation that is whole and was verified, else the published solution."""
    if not _has_answer(row, "answer"):
        return None
    right = row.get("correctness_math_verify") or []
    whole = row.get("is_reasoning_complete") or []
    for place, text in enumerate(row.get("generations") or []):
        if all(place < len(flags) and flags[place] for flags in (right, whole)):
            return {**row, "solution": split_thinking(text)[0] or text}
    return row


def _openmath(row: Row) -> Row | None:
    return row if _has_answer(row, "expected_answer") else None


def _mathvista(row: Row) -> Row | None:
    """Say with the question what its unit, choices and precision are, as the set's own column `query` does.

    That column also says where the answer is to stand, which the schema does here. Rows without an answer (the split
    test) are left out.
    """
    question: Any = row.get("question")
    if not _has_answer(row, "answer") or not isinstance(question, str):
        return None
    if unit := row.get("unit"):
        question = f"{question} (Unit: {unit})"
    choices: Any = row.get("choices") or []
    digits: Any = row.get("precision")
    if choices:
        question += "\nOne of these is the answer: " + "; ".join(map(str, choices))
    elif row.get("answer_type") == "integer":
        question += "\nThe answer is a whole number."
    elif row.get("answer_type") == "float" and isinstance(digits, int | float):
        question += f"\nRound the answer to {digits:.0f} decimal place{'s' * (digits != 1)}."
    elif row.get("answer_type") == "list":
        question += "\nThe answer is a list, such as [1, 2, 3]."
    return {**row, "question": question}


def _mathvista_number(row: Row) -> Row | None:
    """Leave out rows whose answer is not a number."""
    try:
        number = float(str(row.get("answer")))
    except ValueError:
        return None
    return _mathvista(row) if math.isfinite(number) else None


def _has_answer(row: Row, name: str) -> bool:
    answer = row.get(name)
    return answer is not None and str(answer).strip().lower() not in NO_ANSWER


def _train(path: str, split: str = "train", **options: Any) -> dict[str, Part]:
    return {TRAIN: Part(path=path, split=split, **options)}


def _test(path: str, split: str = "test", **options: Any) -> dict[str, Part]:
    return {TEST: Part(path=path, split=split, **options)}


HUB_SETS: dict[str, HubSet] = {
    "gsm8k": HubSet(
        about="word problems; a number",
        licence="MIT",
        card="card",
        parts=_train("openai/gsm8k", configs=("main",)) | _test("openai/gsm8k", configs=("main",)),
    ),
    "math": HubSet(
        about="competition mathematics, seven subjects; LaTeX. Tested on MATH-500",
        licence="MIT",
        card="lm-eval",
        parts=_train("EleutherAI/hendrycks_math", configs=MATH_SUBJECTS) | _test("HuggingFaceH4/MATH-500"),
    ),
    "math500": HubSet(
        about="500 problems of MATH's test split; LaTeX",
        licence="MIT",
        card="lm-eval",
        parts=_test("HuggingFaceH4/MATH-500"),
    ),
    "aime24": HubSet(
        about="AIME 2024, 30 problems; a whole number",
        licence="none named",
        card="lm-eval (for Maxwell-Jia/AIME_2024); this one's columns from use in public code",
        parts=_test("HuggingFaceH4/aime_2024", "train"),
    ),
    "aime25": HubSet(
        about="AIME 2025, 30 problems; a whole number",
        licence="Apache-2.0",
        card="card",
        parts=_test("math-ai/aime25"),
    ),
    "amc": HubSet(
        about="AMC 12 of 2022 and 2023, 83 problems; a number",
        licence="Apache-2.0",
        card="card for splits; columns from use in public code",
        parts=_test("AI-MO/aimo-validation-amc", "train"),
    ),
    "deepscaler": HubSet(
        about="40,000 problems of AIME, AMC, Omni-MATH and STILL; LaTeX",
        licence="MIT",
        card="card for splits; columns from use in public code",
        parts=_train("agentica-org/DeepScaleR-Preview-Dataset"),
    ),
    "dapo_math": HubSet(
        about="17,000 problems, each a hundred times in the file and once here; a whole number",
        licence="Apache-2.0",
        card="card; columns from public code that loads it",
        parts=_train("BytedTsinghua-SIA/DAPO-Math-17k"),
        prompt="prompt",
        answer="reward_model.ground_truth",
        prepare=_dapo,
    ),
    "openr1_math": HubSet(
        about="94,000 problems with reasoning of DeepSeek-R1; LaTeX. --task.config extended, all",
        licence="Apache-2.0",
        card="card for configurations; columns from use in public code",
        parts=_train("open-r1/OpenR1-Math-220k", configs=("default",)),
        prompt="problem",
        answer="answer",
        solution="solution",
        prepare=_openr1,
    ),
    "openmathreasoning": HubSet(
        about="306,000 problems with 3.2 million solutions of R1 and QwQ; LaTeX. --task.split tir, genselect",
        licence="CC BY 4.0",
        card="card",
        parts=_train("nvidia/OpenMathReasoning", "cot"),
        prompt="problem",
        answer="expected_answer",
        solution="generated_solution",
        prepare=_openmath,
        max_rows=100_000,
    ),
    "numina_math": HubSet(
        about="896,000 competition problems, of which those with a comparable answer are used; LaTeX",
        licence="Apache-2.0",
        card="card",
        parts=_train("AI-MO/NuminaMath-1.5"),
        prompt="problem",
        answer="answer",
        solution="solution",
        prepare=_numina,
    ),
    "big_math": HubSet(
        about="251,000 problems made for reinforcement; LaTeX",
        licence="Apache-2.0",
        card="card for splits; columns from use in public code",
        parts=_train("SynthLabsAI/Big-Math-RL-Verified"),
        prompt="problem",
        answer="answer",
    ),
    "mathvista": HubSet(
        about="1,000 questions about figures, charts and photographs (testmini); a number, one of the choices, or a "
        "list",
        licence="CC BY-SA 4.0 (its images have those of their sources)",
        card="card",
        parts=_test("AI4Math/MathVista", "testmini"),
        prompt="question",
        answer="answer",
        images="decoded_image",
        prepare=_mathvista,
    ),
    "mathvista_numbers": HubSet(
        about="those questions of MathVista's testmini whose answer is a number",
        licence="CC BY-SA 4.0 (its images have those of their sources)",
        card="card",
        parts=_test("AI4Math/MathVista", "testmini"),
        prompt="question",
        answer="answer",
        images="decoded_image",
        answer_type="number",
        prepare=_mathvista_number,
    ),
    "geometry3k": HubSet(
        about="3,002 school problems about a figure; a number, often with a root",
        licence="MIT",
        card="card",
        parts=_train("hiyouga/geometry3k") | _test("hiyouga/geometry3k"),
        prompt="problem",
        answer="answer",
        images="images",
    ),
    "clevr_count": HubSet(
        about="count the solids of a rendered scene (CLEVR CoGenT), of 70,000 the first 10,000; a whole number",
        licence="none named",
        card="card for splits; columns from use in public code",
        parts=_train("leonardPKU/clevr_cogen_a_train"),
        prompt="problem",
        solution="solution",
        images="image",
        answer_type="number",
        max_rows=10_000,
    ),
    "humaneval": HubSet(
        about="complete a Python function, 164; a program",
        licence="MIT",
        card="lm-eval",
        parts=_test("openai/openai_humaneval"),
    ),
    "humaneval_plus": HubSet(
        about="HumanEval with 80 times as many tests; a program",
        licence="Apache-2.0",
        card="card",
        parts=_test("evalplus/humanevalplus"),
    ),
    "mbpp": HubSet(
        about="write a Python function; a program",
        licence="CC BY 4.0",
        card="lm-eval",
        parts={
            split: Part(path="google-research-datasets/mbpp", split=their, configs=("full",))
            for split, their in ((TRAIN, "train"), ("dev", "validation"), (TEST, "test"))
        },
    ),
    "mbpp_plus": HubSet(
        about="378 problems of MBPP with 35 times as many tests; a program",
        licence="Apache-2.0",
        card="card",
        parts=_test("evalplus/mbppplus"),
    ),
    "livecodebench": HubSet(
        about="contest problems by standard input and output, or a method; a program. --task.config release_v1 ... v6",
        licence="CC",
        card="card; columns from LiveCodeBench's source",
        parts=_test("lighteval/code_generation_lite", configs=("release_v6",)),
    ),
    "ifeval": HubSet(
        about="541 prompts with instructions that a program can verify; text",
        licence="Apache-2.0",
        card="card",
        parts=_test("google/IFEval", "train"),
    ),
    "ultrachat": HubSet(
        about="200,000 conversations of several turns; replies to learn",
        licence="MIT",
        card="card for splits of its sibling; columns from use in public code",
        parts=_train("HuggingFaceH4/ultrachat_200k", "train_sft")
        | _test("HuggingFaceH4/ultrachat_200k", "test_sft"),
        prompt="messages",
        answer=NONE,
    ),
    "tulu3": HubSet(
        about="939,000 conversations of 19 sources; replies to learn",
        licence="ODC-BY (parts are not for commercial use)",
        card="card",
        parts=_train("allenai/tulu-3-sft-mixture"),
        prompt="messages",
        answer=NONE,
    ),
}
"""Name -> data set. The tasks of these names read it without a path; `whet.tasks.base` says which class judges it."""

PAIR_SETS: dict[str, HubSet] = {
    "ultrafeedback": HubSet(
        about="61,000 prompts with a better and a worse reply",
        licence="MIT",
        card="card",
        parts=_train("HuggingFaceH4/ultrafeedback_binarized", "train_prefs")
        | _test("HuggingFaceH4/ultrafeedback_binarized", "test_prefs"),
    ),
}
"""Name -> preference pairs, for `--pairs`."""


def known_set(path: str) -> HubSet | None:
    """Return the set of this hub name, so that its configuration and columns need not be given."""
    return next((one for one in HUB_SETS.values() if one.path == path), None)
