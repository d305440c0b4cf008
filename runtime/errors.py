"""Errors that end a run with one line, safe to print on a terminal. Imports none of our modules."""

import inspect
import os
import sys
from collections.abc import Callable

# cron or `>&-` may have closed these: a file that is opened later would get their numbers
sys.stdin = sys.stdin or open(os.devnull)
sys.stdout = sys.stdout or open(os.devnull, "w")
sys.stderr = sys.stderr or open(os.devnull, "w")
for number in range(3):  # programs that a run starts also print there
    os.set_inheritable(number, True)
if not __debug__:  # before any code runs that relies on asserts
    print("error: unset PYTHONOPTIMIZE and leave out -O: they drop checks", file=sys.stderr)
    sys.exit(2)


class UserError(ValueError):
    """A mistake that the user can fix, reported in one line; other ValueErrors print a traceback."""


class RunLost(Exception):
    """The run lost an engine or disk space that it needs. It ends with one line and can be resumed."""


def place_of(function: Callable) -> str:
    """Return a function's file and line, for errors; what it is if it isn't written in Python."""
    if not inspect.isfunction(function):
        return repr(function)
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"


def printable(text: str) -> str:
    """Escape what a terminal can't or mustn't print: a control sequence could rewrite the screen."""
    unsafe = {c for c in text if not c.isprintable() and c not in "\n\t"}
    text = text.translate({ord(c): c.encode("unicode_escape").decode() for c in unsafe})
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
