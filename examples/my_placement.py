"""Your own placement.

torchrun --nproc-per-node 3 examples/my_placement.py --placement last --algorithm ppo
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import placement
import run
from scheduling.layout import Placement, Shape


def critics_last(everyone, config):  # critics get the last ranks; everything else shares the others
    shape = Shape.of(config, everyone)  # --tp and --pp, the same for every model
    cut = len(everyone) - shape.copy_size
    actor = shape._replace(ranks=everyone[:cut])
    critic = shape._replace(ranks=everyone[cut:])
    return Placement(engines=everyone[:cut], actor=actor, critic=critic, reference=actor)


placement.PLACEMENTS["last"] = critics_last
if __name__ == "__main__":
    run.main(sys.argv[1:])
