"""An actor for `vs_trl.py --size larger`: the demo's task, tokenizer and warm start, nine times the demo's parameters (3.4 million).

    torchrun --nproc-per-node 2 bench/larger_model.py DIR
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch.distributed as dist

import run
import warmstart
from config import Config
from report import Progress

SHAPE = dict(hidden_size=256, intermediate_size=768, num_hidden_layers=4, head_dim=64)
STEPS = 150  # enough to end answers and to be right now and then


def main() -> None:
    target = Path(sys.argv[1])
    config = Config()
    world = run.join_ranks(config)
    warmstart.SHAPE.update(SHAPE)
    new = target.with_name(target.name + ".new")
    if world.rank == 0:
        warmstart.new_model(new, config.seed)
    dist.barrier()
    recipe, progress = warmstart.RECIPE["actor"] | {"steps": STEPS}, Progress(STEPS, world.rank == 0)
    warmstart.train(config, world, new, target, warmstart.demonstrations(config.seed), recipe, "larger actor", progress)
    progress.close()
    world.close()


if __name__ == "__main__":
    main()
