"""The demos: the same problems, written or drawn, for models that read or see; how each pair is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from examples.make_demo.models import text_model, vision_model
from recipes.addition import task

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAM_LR, MUON_LR = 2e-3, 0.02


class Demo(NamedTuple):
    """What differs between the demos."""

    show: task.Show
    build: Callable[[], PreTrainedModel]
    actor: dict  # blurt: part of the demonstrations that only say the answer
    # right and corrupted answers; the rest are the actor's own errors on `pool` problems
    judge: dict


DEMOS = {
    "written": Demo(
        task.written,
        text_model,
        actor=dict(steps=250, batch=128, blurt=0.6),
        judge=dict(steps=500, batch=64, right=0.5, corrupted=0.3, pool=1024),
    ),
    "drawn": Demo(
        task.drawn,
        vision_model,
        actor=dict(steps=220, batch=64, blurt=0.6),
        judge=dict(steps=300, batch=64, right=0.5, corrupted=0.3, pool=512),
    ),
}
WRITTEN, DRAWN = DEMOS.values()
