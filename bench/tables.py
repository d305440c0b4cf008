"""How measurements are shown: medians with their spread, tables in Markdown, pictures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median (smallest-largest)."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def quartile_spread(values: Sequence[float], digits: int = 2) -> str:
    """Median (lower quartile-upper quartile)."""
    return spread(quantiles(values, n=4) if len(values) > 1 else values, digits)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """In Markdown, after an empty line."""
    print(f"\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for row in rows:
        print(f"| {' | '.join(row)} |")


@contextmanager
def picture(path: Path, panels: int, width: float) -> Iterator[list]:
    """The axes of so many panels side by side; a PNG once they are drawn. width: of a panel, in inches."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (width * panels, 3.6)
    figure, axes = pyplot.subplots(1, panels, figsize=size, squeeze=False, constrained_layout=True)
    yield list(axes[0])
    figure.savefig(path, dpi=110)
