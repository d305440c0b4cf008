"""What SGLang's wheels need of a machine. `python runtime/supported.py` says in one line what it lacks."""

from __future__ import annotations

import platform
import sys

GLIBC = (2, 34)  # Ubuntu 22.04, Debian 12, RHEL 9


def lacks(python: tuple[int, ...] = sys.version_info[:2], libc: tuple[str, str] | None = None) -> str:
    """Why the requirements can't be installed here; empty if they can. libc: its name and version."""
    if not (3, 11) <= python <= (3, 13):
        found = ".".join(map(str, python))
        return f"Python 3.11, 3.12 or 3.13 is needed, and this is {found}: make PYTHON=python3.13"
    name, version = libc or platform.libc_ver()
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if name != "glibc" or numbers < GLIBC:
        found = f"{name} {version}".strip() or "another libc"
        return f"Linux with glibc 2.34 is needed (Ubuntu 22.04, Debian 12, RHEL 9), and this is {found}"
    return ""


if __name__ == "__main__":
    sys.exit(lacks() or None)
