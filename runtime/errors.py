"""How a run ends that can't go on: in one line, which is safe for a terminal. Imports nothing of ours."""


class UserError(ValueError):
    """A mistake that the user can mend, told in one line; any other ValueError shows its place."""


class RunLost(Exception):
    """The run lost what it needs, an engine or room on a disk. It ends in one line, and goes on later."""


def printable(text: str) -> str:
    """Make text from elsewhere safe for a terminal: an escape sequence could rewrite the screen."""
    unsafe = {c for c in text if not c.isprintable() and c not in "\n\t"}
    return text.translate({ord(c): c.encode("unicode_escape").decode() for c in unsafe})
