"""Users' own code: how it is loaded from their files, and how its errors are reported."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from runtime.errors import UserError


@dataclass(frozen=True)
class UserCode(AbstractContextManager):
    """A block that runs a user's code: an error in it becomes a UserError with its title, file and line."""

    title: str  # as the user named it: --rule my.py:score
    file: str = ""
    passes: tuple[type[Exception], ...] = ()  # errors that stay as they are
    pid: int = field(default_factory=os.getpid)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None):
        if os.getpid() != self.pid:
            # this is a child that the code forked: it must not continue as a rank
            status = error.code if isinstance(error, SystemExit) else error
            os._exit(status if isinstance(status, int) else int(status is not None))
        if isinstance(error, Exception | SystemExit) and not isinstance(error, self.passes):
            frames = traceback.extract_tb(trace)
            lines = [frame.lineno for frame in frames if frame.filename == self.file]
            where = f" ({self.file}:{lines[-1]})" if lines else ""
            text = " ".join(str(error).split())
            raise UserError(f"{self.title}{where}: {type(error).__name__}: {text}") from None


def load(
    title: str, spec: str, name: str, kind: str, fits: Callable[[Any], bool], specs: str
) -> tuple[Any, UserCode]:
    """Run a file; return its `name`, or `other` for `my.py:other`. Raises UserError if it has none.

    title: the setting. kind: a description like `class {}`, which `fits` checks. specs: valid forms of spec.
    """
    named = f"{spec}:{name}" if spec.endswith(".py") else spec
    path, _, name = named.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        raise UserError(f"{title}: no such file; use {specs}")
    code = UserCode(title, str(Path(path).resolve()))
    with code:
        module = module_of(Path(code.file))
    found = vars(module).get(name)
    if not fits(found):
        raise UserError(f"{title}: {path} has no {kind.format(name)}")
    return found, code


def module_of(path: Path) -> ModuleType:
    """Import a file under its own name if that is free, as processes that its code starts will do."""
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    found = importlib.util.find_spec(path.stem) if path.stem.isidentifier() else None
    if found and found.origin == str(path):
        return importlib.import_module(path.stem)
    found = importlib.util.spec_from_file_location(f"user_{path.stem}", path)
    module = sys.modules[found.name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module
