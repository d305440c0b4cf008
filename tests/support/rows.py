"""Files of rows, as users write them."""

import json
from pathlib import Path

from runtime import shared


def jsonl(path: Path, rows: list) -> Path:
    """Write a row a line: an object, or a text as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def become_rank(monkeypatch, folder: Path, rank: int) -> None:
    """Let this process be a rank of a machine whose ranks share this folder."""
    monkeypatch.setattr(shared, "private_folder", lambda: folder)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("LOCAL_RANK", str(rank))
