"""An actor for `vs_trl.py --size larger`: the demo's task and warm start, nine times its parameters (3.4 M).

torchrun --nproc-per-node 2 bench/larger_model.py DIR
"""

from __future__ import annotations

import shutil
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch.distributed as dist

from config import parse_config
from examples.make_demo import models, texts, warmstart
from reporting.progress import Progress
from runtime import rendezvous

SHAPE = dict(hidden_size=256, intermediate_size=768, num_hidden_layers=4, head_dim=64)
STEPS = 150  # enough to end answers and to be right now and then


def main() -> None:
    target = Path(sys.argv[1])
    work = target.with_name(target.name + ".part")
    config = parse_config([])
    world = rendezvous.join(config)
    models.SHAPE.update(SHAPE)
    if world.rank == 0:
        shutil.rmtree(work, ignore_errors=True)
        models.new_model(work / "new", config.seed)
    dist.barrier()
    progress = Progress(STEPS, world.rank == 0)
    batches = partial(texts.demonstrations, config.seed)
    warmstart.train(config, world, work / "new", work / "actor", batches, STEPS, progress)
    if world.rank == 0:  # at once, so that what is there is whole
        (work / "actor").rename(target)
        shutil.rmtree(work)
    progress.close()
    world.close()
    rendezvous.close()


if __name__ == "__main__":
    main()
