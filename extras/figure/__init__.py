"""OUT/timeline.png: the paper's picture, drawn from a run's spans."""

from pathlib import Path
from typing import Any

from reporting.metrics import PICTURES


def draw(out: Path) -> Any:
    from extras.figure import drawing  # matplotlib is slow to import; only one rank draws

    return drawing.make_figure(drawing.read_run(out, -4, -1))


PICTURES["timeline.png"] = draw
