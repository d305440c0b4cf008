"""Draw the rewards and the held-out accuracy of runs, step by step.

python examples/draw_curves.py PICTURE.png OUT [OUT ...]
"""

import json
import sys
from pathlib import Path

from matplotlib import pyplot


def main() -> None:
    picture, *folders = sys.argv[1:]
    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    for number, folder in enumerate(folders):
        rows = [json.loads(line) for line in Path(folder, "metrics.jsonl").open()]
        rewards = {r["step"] + 1: r["reward/unfiltered_mean"] for r in rows if "reward/mean" in r}
        accuracies = {r["step"]: r["eval/accuracy"] for r in rows if "eval/accuracy" in r}
        name = Path(folder).name
        style = dict(color=f"C{number}")
        axes.plot(
            rewards.keys(), rewards.values(), **style, label=f"{name}: reward of step 1, 2, ..."
        )
        label = f"{name}: held-out accuracy after that many steps"
        axes.plot(accuracies.keys(), accuracies.values(), "o--", **style, label=label)
    axes.set(xlabel="step", ylabel="fraction of answers that are right", ylim=(0, 1))
    axes.legend(fontsize=8)
    figure.savefig(picture, dpi=100)


if __name__ == "__main__":
    main()
