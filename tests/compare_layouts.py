"""What a model learns under every parallel layout before and after a change: equal to the last bit.

    python tests/compare_layouts.py BEFORE AFTER      a line a layout; exit status 1 if any number differs

Both folders hold what parallel_worker.py, critic_worker.py or finetune_worker.py left for one case.pt:
result.2 and the like with metrics, gradients and weights, and the exported models. What only AFTER has is
no difference; columns that a change renames go into RENAMED for the comparison.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

RENAMED: dict[str, str] = {}  # name before -> name after
TIMED = {"train/seconds_spread", "spread_with_a_slow_rank"}


def leaves(value, where: str = "") -> Iterator[tuple[str, object]]:
    """Every tensor and number of nested containers, with its place."""
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        yield where, value
        return
    for name, part in value.items():
        if name not in TIMED:
            yield from leaves(part, f"{where} {RENAMED.get(name, name)}")


def results_of(folder: Path) -> dict[str, dict[str, object]]:
    """By layout, what its ranks returned and the model that they exported."""
    layouts = {}
    for path in sorted(file for file in folder.glob("result.*") if file.suffix[1:].isdigit()):
        for name, result in torch.load(path, weights_only=False).items():
            name = ".".join(name) if isinstance(name, tuple) else name
            exported = load_file(folder / f"result.{name}" / "model.safetensors")
            layouts[name] = dict(leaves(result)) | dict(leaves(exported, "exported"))
    return layouts


def same(one, other) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def main(before: Path, after: Path) -> int:
    one, two, differs = results_of(before), results_of(after), False
    for layout in sorted(one.keys() | two.keys()):
        old, new = one.get(layout, {}), two.get(layout, {})
        found = [name for name in sorted(old) if name not in new or not same(old[name], new[name])]
        differs |= bool(found)
        print(
            f"{layout}: {f'{len(found)} differ: {found[:5]}' if found else f'all {len(old)} are equal'}"
        )
    return int(differs or not one)


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
