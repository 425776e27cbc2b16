"""Tasks from the user's own Python file: `--task.name path.py:MyTask`."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from whet.config import user_path
from whet.sandbox.graders.loading import spec_of
from whet.sandbox.reentry import importing
from whet.schema import ANSWER_TYPE_WORDS
from whet.types import LARGEST_REWARD, Allowed, Problem, Turn, UserError

OPTIONAL = ("judge_many", "wrong_answer", "other_spellings", "seconds_per_answer")
"""Attributes of the user's class that are passed through: see `whet.eval.audit` and `whet.types.ManyJudge`."""
_NAME = re.compile(r"(.+\.py):([A-Za-z_]\w*)")


def is_user_task(name: str) -> bool:
    """Say whether a task's name has the form `path.py:MyTask`."""
    return _NAME.fullmatch(name) is not None


class UserTask:
    """A user's task: its `problems` and `is_correct`, with mistakes reported in one line.

    Attributes:
        name: The task's `name`, else the name of its class.
        answer_type: The task's `answer_type`, else 'text'.
        environment: The task's, if it has one. `OPTIONAL` names the other attributes that are passed through.
    """

    def __init__(self, spec: str, path: str = "") -> None:
        """Import the file and make the task.

        Args:
            spec: `path.py:MyTask`.
            path: Passed to a constructor that has a parameter `path`.

        Raises:
            UserError: If there is no such file or class, the import or the constructor fails, or a method is missing.
        """
        match = _NAME.fullmatch(spec)
        assert match is not None
        self._file = Path(match[1])
        module = self._imported()
        maker = getattr(module, match[2], None)
        if not isinstance(maker, type):
            yet = " above the call that starts this run" if module is sys.modules["__main__"] else ""
            raise UserError(f"task '{spec}': no class {match[2]} in {self._file}{yet}")
        missing = [name for name in ("problems", "is_correct") if not callable(getattr(maker, name, None))]
        if missing:
            raise UserError(
                f"task '{spec}': class {match[2]} has no method {' and no method '.join(missing)}"
            )
        options = {"path": path} if path else {}
        if path and "path" not in inspect.signature(maker).parameters:
            raise UserError(f"task.path is not read by task {spec}: its constructor has no parameter 'path'")
        self._task = self._call("its constructor", maker, **options)
        self.name: str = str(getattr(self._task, "name", match[2]))
        self.answer_type: Any = getattr(self._task, "answer_type", "text")
        if self.answer_type not in ANSWER_TYPE_WORDS:
            kinds = ", ".join(ANSWER_TYPE_WORDS)
            raise UserError(
                f"{self._file}: answer_type is {_kind(self.answer_type)}, expected one of {kinds}"
            )
        for name in OPTIONAL:
            if hasattr(self._task, name):
                setattr(self, name, getattr(self._task, name))
        if hasattr(self._task, "allowed"):
            self.allowed = self._allowed
        if hasattr(self._task, "environment"):
            self.environment = _UserEnvironment(self._task.environment, self._file, self._call)

    def _allowed(self, problem: Problem) -> list[Allowed]:
        """Return what the user's rules allow in an answer, checked."""
        found = self._call("allowed()", lambda: [Allowed(*place) for place in self._task.allowed(problem)])
        for start, texts in found:
            is_list = isinstance(texts, list | tuple | set | frozenset)
            if not isinstance(start, int) or not is_list or not all(isinstance(text, str) for text in texts):
                raise UserError(
                    f"{self._file}: allowed() returned ({start!r}, {str(texts)[:40]}), expected pairs of a character "
                    "of the answer and the texts allowed there, such as (0, ['knight', 'bishop'])"
                )
        return found

    def problems(self, split: str) -> list[Problem]:
        """Return the problems of 'train', 'dev' or 'test'.

        Raises:
            UserError: If they are not a list of `whet.types.Problem` with texts and different uids, or the user's code
                fails.
        """
        found = self._call(f"problems({split!r})", self._task.problems, split)
        if not isinstance(found, list | tuple) or not found:
            raise UserError(
                f"{self._file}: problems({split!r}) returned {_kind(found)}, expected a list of whet.types.Problem"
            )
        uids: set[str] = set()
        for place, problem in enumerate(found):
            if not isinstance(problem, Problem):
                raise UserError(
                    f"{self._file}: problems({split!r})[{place}] is {_kind(problem)}, expected a whet.types.Problem"
                )
            for field in ("uid",) if problem.reply else ("uid", "prompt", "answer"):
                if not isinstance(getattr(problem, field), str) or not getattr(problem, field).strip():
                    raise UserError(
                        f"{self._file}: problems({split!r})[{place}].{field} is {_kind(getattr(problem, field))}, "
                        "expected text that is not empty"
                    )
            if problem.uid in uids:
                raise UserError(
                    f"{self._file}: problems({split!r})[{place}] has the uid {problem.uid!r} of another problem; "
                    "use whet.types.problem_uid(task, prompt)"
                )
            uids.add(problem.uid)
        return list(found)

    def is_correct(self, problem: Problem, answer: str | None) -> bool | None:
        """Judge an answer by the user's task; None: it could not be judged.

        Raises:
            UserError: If the user's code fails, or returns something other than True, False or None.
        """
        verdict = self._call("is_correct", self._task.is_correct, problem, answer)
        if verdict is not None and not isinstance(verdict, bool):
            raise UserError(
                f"{self._file}: is_correct returned {_kind(verdict)}, expected True, False or None"
            )
        return verdict

    def _imported(self) -> ModuleType:
        """Import the file once per process, under a unique name; it may import from its folder, as a script may.

        The main script is not run again: its class exists already.
        """
        path = user_path(self._file).resolve()
        main = sys.modules["__main__"]
        if path == Path(getattr(main, "__file__", None) or os.devnull).resolve():
            return main
        name = f"whet_user_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
        if name in sys.modules:
            return sys.modules[name]
        if path.suffix != ".py" or not path.is_file():
            raise UserError(f"task file {str(self._file)!r}: no such file; check --task.name")
        spec = spec_of(name, path)
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        sys.path.append(str(path.parent))
        try:
            with importing(str(self._file)):
                self._call("the import", spec.loader.exec_module, module)
        except UserError:
            del sys.modules[name]
            raise
        finally:
            sys.path.remove(str(path.parent))
        return module

    def _call(self, what: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call the user's code; an exception becomes one line that names the line of the user's file."""
        try:
            return function(*args, **options)
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            path = str(user_path(self._file).resolve())
            frames = traceback.extract_tb(error.__traceback__)
            line = next((frame.lineno for frame in reversed(frames) if frame.filename == path), None)
            line = error.lineno if isinstance(error, SyntaxError) else line
            where = f"{self._file} line {line}" if line else str(self._file)
            reason = (str(error).splitlines() or [""])[0][:200]
            raise UserError(f"{where}: {what} failed: {type(error).__name__}: {reason}") from error


class _UserEnvironment:
    """The user's environment, with mistakes reported in one line."""

    def __init__(self, inner: Any, file: Path, call: Callable[..., Any]) -> None:
        missing = [name for name in ("reset", "step") if not callable(getattr(inner, name, None))]
        if missing:
            raise UserError(f"{file}: environment has no method {' and no method '.join(missing)}")
        self._inner, self._file, self._call = inner, file, call

    def reset(self, problem: Problem) -> Any:
        """Begin an episode."""
        return self._call("environment.reset", self._inner.reset, problem)

    def step(self, states: Sequence[Any], texts: Sequence[str]) -> list[Turn]:
        """Answer the newest turns."""
        turns = self._call("environment.step", self._inner.step, states, texts)
        if not isinstance(turns, list | tuple) or len(turns) != len(texts):
            raise UserError(
                f"{self._file}: environment.step returned {_kind(turns)}, expected a list of {len(texts)} Turns"
            )
        for turn in turns:
            self._check(turn)
        return list(turns)

    def _check(self, turn: Any) -> None:
        is_turn = isinstance(turn, Turn) and (turn.observation is None or isinstance(turn.observation, str))
        if not is_turn or isinstance(turn.reward, bool) or not isinstance(turn.reward, (int, float)):
            raise UserError(
                f"{self._file}: environment.step returned {_kind(turn)}, expected whet.types.Turn with text or None as "
                "observation and a number as reward"
            )
        if not abs(turn.reward) <= LARGEST_REWARD:
            paid = f"{turn.reward:g}" if isinstance(turn.reward, float) else "a larger integer"
            raise UserError(
                f"{self._file}: environment.step paid {paid}, expected a number from -{LARGEST_REWARD:g} to "
                f"{LARGEST_REWARD:g}"
            )


def _kind(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text[:60]}" if value is not None else "None"
