"""Files of rows, as users write them."""

import json
from pathlib import Path


def jsonl(path: Path, rows: list) -> Path:
    """Write a row a line: an object, or a text as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines))
    return path
