"""Draw the rewards and the held-out accuracy of runs, step by step.

python examples/draw_curves.py PICTURE.png OUT [OUT ...]
"""

import json
import sys
from pathlib import Path

from matplotlib import pyplot

CURVES = {"reward/unfiltered_mean": "-", "eval/accuracy": "o--"}  # metric -> how it is drawn


def main() -> None:
    picture, *folders = sys.argv[1:]
    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    for number, folder in enumerate(folders):
        rows = [json.loads(line) for line in Path(folder, "metrics.jsonl").open()]
        for metric, style in CURVES.items():
            points = {row["step"]: row[metric] for row in rows if metric in row}
            label = f"{metric}, {Path(folder).name}"
            axes.plot(points.keys(), points.values(), style, color=f"C{number}", label=label)
    axes.set(xlabel="step", ylim=(0, 1))
    axes.legend()
    figure.savefig(picture, dpi=100)


if __name__ == "__main__":
    main()
