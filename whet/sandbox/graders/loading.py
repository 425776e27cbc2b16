"""Loads a worker's function, by import or from the source text that the trainer sent."""

from __future__ import annotations

import importlib.util
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

LONGEST_MESSAGE = 500
_OURS = os.path.dirname(os.path.dirname(__file__))


class LoadError(ValueError):
    """A function cannot be loaded; the message is one line.

    Attributes:
        is_reentry: Whether it failed because importing the file starts a training.
    """

    def __init__(self, message: str, cause: BaseException | None = None) -> None:
        super().__init__(message)
        self.is_reentry = False
        while cause is not None and not self.is_reentry:
            self.is_reentry = type(cause).__name__ == "ReentryError"  # by name: avoids importing whet's types
            cause = cause.__cause__ or cause.__context__


def load_function(spec: str) -> Callable[..., Any]:
    """Import a function by 'path/to/file.py:name' or 'package.module:name'.

    Raises:
        LoadError: If the import fails or there is no such function.
    """
    target, _, name = spec.rpartition(":")
    try:
        if target.endswith(".py"):
            module = import_file(Path(target))
        else:
            module = pkgutil.resolve_name(f"{target}:")
    except BaseException as error:
        message = f"grader '{spec}': importing {target} failed: {describe(error)}"
        if isinstance(error, ModuleNotFoundError):
            message += "; install it, or put the folder that it lies in on PYTHONPATH"
        raise LoadError(message, error) from error
    function = getattr(module, name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_"]
        found = ", ".join(own[:10]) or "no functions"
        raise LoadError(f"grader '{spec}': {target} has no function '{name}'; it has {found}")
    return function


def check_parameters(function: Callable[..., Any], names: Sequence[str]) -> None:
    """Refuse a function that cannot be called with so many arguments.

    Args:
        function: The function.
        names: What the arguments are.

    Raises:
        LoadError: With what it takes.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # one in C may not say
        return
    is_of_trl = {"prompts", "completions"} <= signature.parameters.keys()
    try:
        signature.bind(*names)
        if not is_of_trl:
            return
    except TypeError:
        is_of_trl = "completions" in signature.parameters
    name = getattr(function, "__name__", "the function")
    called = f"{name}({', '.join(names)})"
    message = f"{name}{signature} cannot be called as {called}"[:300]
    if is_of_trl:
        message += (
            "; as TRL's rewards it takes lists and returns a list: wrap it, `def one(problem, completion): return "
            f"{name}(prompts=[problem.prompt], completions=[completion])[0]`, with what else it reads"
        )
    elif name.isidentifier():
        message += f"; begin it with: def {called}:"
    raise LoadError(message)


def import_file(path: Path) -> ModuleType:
    """Import a file once, with its folder first on the search path."""
    name = f"whet_grader_{path.stem}"
    module = sys.modules.get(name)
    if module is None or module.__file__ != str(path):
        sys.path.insert(0, str(path.parent))
        spec = spec_of(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        assert spec.loader is not None
        spec.loader.exec_module(module)
    return module


class _Uncached(SourceFileLoader):
    """Compiles a file as it is now: Python's cache takes an edit within a second that keeps the size for no edit."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def spec_of(name: str, path: Path) -> ModuleSpec:
    """Return what imports a user's file under a name: the text that it has now, whatever was compiled of it before."""
    spec = importlib.util.spec_from_file_location(name, path, loader=_Uncached(name, str(path)))
    assert spec is not None
    return spec


def rebuild(parcel: Mapping[str, Any]) -> Callable[..., Any]:
    """Rebuild a function from the pieces of source that `whet.sandbox.graders.shipping` packed, in its own module.

    Raises:
        LoadError: If a piece fails.
    """
    module = ModuleType(parcel["module"])
    module.__file__, module.__package__ = parcel["file"], parcel["package"]
    sys.modules[module.__name__] = module
    for text, file, line, flags in parcel["pieces"]:
        try:
            # Empty lines in front, so that later errors carry the line number of the user's file.
            code = compile("\n" * (line - 1) + text, file, "exec", flags, dont_inherit=True)
            exec(code, vars(module))
        except BaseException as error:
            statement = text.strip().removeprefix("if True:").strip().splitlines()[0][:60]
            message = f"its worker process failed at `{statement}`: {describe(error)}"
            raise LoadError(f"grader '{parcel['label']}': {message}", error) from error
    return vars(module)[parcel["function"]]


def describe(error: BaseException) -> str:
    """Say in one line what was raised and where."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "(its message cannot be printed)"
    place = ""
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(("<frozen", "<string", "<whet")) and not file.startswith(_OURS):
            place = f" ({os.path.basename(file)}:{trace.tb_lineno})"
        trace = trace.tb_next
    return f"{type(error).__name__}: {text}"[:LONGEST_MESSAGE] + place
