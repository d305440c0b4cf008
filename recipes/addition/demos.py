"""The demos: the same problems, written or drawn, for models that read or see; how each pair is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from config import Config
from recipes.addition import task
from recipes.addition.models import SHAPE, TOWER, VOCAB, text_model, vision_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RECIPE = dict(version=2, vocab=VOCAB, shape=SHAPE, adam_lr=2e-3, muon_lr=0.02)
RECIPE["actor"] = dict(steps=250, batch=128, blurt=0.6)  # blurt: part that only say the answer
# right and corrupted answers; the rest are the actor's own errors on `pool` problems
RECIPE["judge"] = dict(steps=500, batch=64, right=0.5, corrupted=0.3, pool=1024)
DRAWN_RECIPE = RECIPE | dict(version=1, tower=TOWER, actor=dict(steps=220, batch=64, blurt=0.6))
DRAWN_RECIPE["judge"] = dict(steps=300, batch=64, right=0.5, corrupted=0.3, pool=512)


class Demo(NamedTuple):
    """What differs between the demos."""

    name: str  # of its cache
    show: task.Show
    build: Callable[[], PreTrainedModel]
    recipe: dict


WRITTEN = Demo("addition", task.written, text_model, RECIPE)
DRAWN = Demo("drawn_addition", task.drawn, vision_model, DRAWN_RECIPE)


def demo_of(config: Config) -> Demo:
    """Of the preset; a --model of one's own is asked the written problems, too."""
    return {"images": DRAWN}.get(config.preset, WRITTEN)
