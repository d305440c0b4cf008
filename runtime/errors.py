"""How a run ends that can't go on: in one line, which is safe for a terminal. Imports nothing of ours."""

import sys

if not __debug__:  # before anything runs that an assert should check
    print("error: unset PYTHONOPTIMIZE and leave out -O: they drop checks", file=sys.stderr)
    sys.exit(2)


class UserError(ValueError):
    """A mistake that the user can mend, told in one line; any other ValueError shows its place."""


class RunLost(Exception):
    """The run lost what it needs, an engine or room on a disk. It ends in one line, and goes on later."""


def printable(text: str) -> str:
    """Escape what a terminal can't show, or must not: an escape sequence could rewrite the screen."""
    unsafe = {c for c in text if not c.isprintable() and c not in "\n\t"}
    text = text.translate({ord(c): c.encode("unicode_escape").decode() for c in unsafe})
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
