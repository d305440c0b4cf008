"""The picture of the processes: what two ranks start, and what passes between them.

python bench/processes.py              -> docs/processes.png
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

sys.path.insert(0, str(Path(__file__).parent.parent))

from reporting.figure import GREY, INK
from reporting.timeline import COLORS

PICTURE = Path(__file__).parent.parent / "docs" / "processes.png"
WIDTH, HEIGHT = 13.0, 5.2  # inches, which are the picture's coordinates, too
BOX_WIDTH, BOX_HEIGHT = 2.4, 0.82
SERVERS, CONTROLLERS, TRAINERS = 3.75, 1.95, 0.6  # lower edges of the rows of boxes
RANKS = (0.3, 7.1)  # left edges of the two ranks
RANK_WIDTH = 5.6
ROLLOUT, OWN, GENRM = 0.3, 1.6, 2.9  # left edges of the boxes in their rank


def box(axes: Axes, x: float, y: float, name: str, what: str, color: str) -> None:
    """A part of a rank: its name, and what it does in a few words."""
    shape = FancyBboxPatch((x, y), BOX_WIDTH, BOX_HEIGHT, boxstyle="round,pad=0,rounding_size=0.06")
    shape.set(facecolor=color, edgecolor="none")
    axes.add_patch(shape)
    center = x + BOX_WIDTH / 2
    axes.text(
        center,
        y + 0.55,
        name,
        color="white",
        fontsize=10.5,
        weight="bold",
        ha="center",
        va="center",
    )
    axes.text(center, y + 0.25, what, color="white", fontsize=8, ha="center", va="center")


def frame(axes: Axes, x: float, y: float, width: float, height: float) -> None:
    """A dashed border around what belongs together."""
    shape = FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.08")
    shape.set(facecolor="none", edgecolor=GREY, linestyle=(0, (3, 2.5)), linewidth=0.9)
    axes.add_patch(shape)


def arrow(axes: Axes, start: tuple, end: tuple, color: str = INK, style: str = "<->") -> None:
    axes.annotate(
        "", xy=end, xytext=start, arrowprops=dict(arrowstyle=style, color=color, linewidth=1.3)
    )


def note(axes: Axes, x: float, y: float, text: str, color: str = INK) -> None:
    ground = dict(facecolor="white", edgecolor="none", pad=1.5)
    axes.text(
        x,
        y,
        text,
        color=color,
        fontsize=8.5,
        ha="center",
        va="center",
        linespacing=1.35,
        bbox=ground,
    )


def draw_rank(axes: Axes, x: float, rank: int) -> None:
    """One process that torchrun starts, and the two servers that it starts itself."""
    frame(axes, x, 0.08, RANK_WIDTH, 5.0)
    name = f"rank {rank}: one GPU, or its part of the CPU"
    axes.text(x + 0.1, 4.9, name, color=GREY, fontsize=8.5, va="center")
    frame(axes, x + OWN - 0.2, 0.2, BOX_WIDTH + 0.4, 2.75)
    note(axes, x + OWN + BOX_WIDTH / 2, 0.36, f"run.py, process {rank} of torchrun", GREY)
    box(axes, x + ROLLOUT, SERVERS, "rollout server", "SGLang: writes answers", COLORS["rollout"])
    box(axes, x + GENRM, SERVERS, "genrm server", "SGLang: writes verdicts", COLORS["genrm"])
    box(axes, x + OWN, CONTROLLERS, "controller", "its own prompts, the loop", INK)
    box(axes, x + OWN, TRAINERS, "trainer", "Megatron-Core: actor, critics", COLORS["train"])
    center, top = x + OWN + BOX_WIDTH / 2, TRAINERS + BOX_HEIGHT
    arrow(axes, (center, CONTROLLERS), (center, top))
    note(axes, center + 0.5, (CONTROLLERS + top) / 2, "samples")
    push, trainer = x + ROLLOUT + 0.5, TRAINERS + 0.15
    axes.plot((x + OWN, push), (trainer, trainer), color=COLORS["sync"], linewidth=1.3)
    arrow(axes, (push, trainer), (push, SERVERS), COLORS["sync"], "->")
    note(axes, push, 1.7, "weights,\nas handles", COLORS["sync"])


def draw(path: Path) -> None:
    """Two ranks, and the ways between processes: HTTP to every server, gloo between ranks, handles."""
    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=120)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(0, HEIGHT))
    axes.set_axis_off()
    for caller in RANKS:
        top = (caller + OWN + BOX_WIDTH / 2, CONTROLLERS + BOX_HEIGHT)
        for callee in RANKS:
            for role in (ROLLOUT, GENRM):
                color = INK if caller == callee else "#c3c8ce"
                arrow(axes, top, (callee + role + BOX_WIDTH / 2, SERVERS), color)
    for rank, x in enumerate(RANKS):
        draw_rank(axes, x, rank)
    left, right = RANKS[0] + OWN + BOX_WIDTH, RANKS[1] + OWN
    for row in (CONTROLLERS, TRAINERS):
        arrow(axes, (left, row + BOX_HEIGHT / 2), (right, row + BOX_HEIGHT / 2))
    note(axes, WIDTH / 2, CONTROLLERS + 0.16, "gloo: counts, lengths;\nsamples point to point")
    note(axes, WIDTH / 2, TRAINERS + 0.16, "gloo, or NCCL on GPUs:\ngradients")
    note(axes, WIDTH / 2, SERVERS + 0.12, "HTTP: any controller\nasks any server")
    figure.savefig(path)


def main() -> None:
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    draw(PICTURE)


if __name__ == "__main__":
    main()
