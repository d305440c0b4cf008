"""Models and engines on separate ranks: placements that aren't colocated, and --ahead.

HybridFlow (arXiv 2409.19256), section 8.3, compares `split` and `standalone` with `colocate`. Others list
ranks: `engines=0-3 actor=0-1 critic=2-3:tp2`. With --ahead, serving ranks go on while others train.
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any

from algorithms import algorithm_of
from config import Config
from placement import PLACEMENTS, Colocated, Devices
from runtime.errors import UserError
from runtime.world import World
from scheduling.dealing import Shares
from scheduling.layout import SIZES, Placement, Shape
from scheduling.pipeline import schedule_of

if TYPE_CHECKING:
    from extras.apart.elsewhere import Elsewhere
    from extras.apart.push import Route

RANKS = re.compile(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*")


def critics_apart(everyone: tuple[int, ...], config: Config) -> Placement:
    """Put actor and reference on one half, critics on the other, engines on all. HybridFlow, section 8.3."""
    shape = Shape.of(config, everyone)
    cut = len(everyone) // 2 // shape.copy_size * shape.copy_size
    actor = shape._replace(ranks=everyone[: len(everyone) - cut])
    critic = shape._replace(ranks=everyone[len(everyone) - cut :])
    return Placement(everyone, actor, critic, actor)


def standalone(everyone: tuple[int, ...], config: Config) -> Placement:
    """Put engines on one half, and divide the other between actor and critics. HybridFlow, section 8.3."""
    shape = Shape.of(config, everyone)
    models = 2 if algorithm_of(config).critics else 1
    each = max(1, len(everyone) // 2 // models // shape.copy_size) * shape.copy_size
    first = len(everyone) - models * each
    actor = shape._replace(ranks=everyone[first : first + each])
    critic = shape._replace(ranks=everyone[-each:])
    return Placement(everyone[:first], actor, critic, actor)


def placement_from(everyone: tuple[int, ...], config: Config) -> Placement:
    """Read a placement such as engines=0-3 actor=0-1 critic=2-3:tp2. Raises UserError if it is malformed.

    Engines and actor are on all ranks unless named, other models on the actor's.
    """
    default = Shape.of(config, everyone)
    words = dict(word.partition("=")[::2] for word in config.placement.split())
    known = ("engines", "actor", "critic", "reference")
    if unknown := words.keys() - {*known}:
        raise UserError(f"{min(unknown)} is not one of {', '.join(known)}")
    engines = ranks_from(words["engines"]) if "engines" in words else default.ranks
    actor = shape_from(words["actor"], default) if "actor" in words else default
    critic = shape_from(words["critic"], actor) if "critic" in words else actor
    reference = shape_from(words["reference"], actor) if "reference" in words else actor
    return Placement(engines, actor, critic, reference)


def ranks_from(text: str) -> tuple[int, ...]:
    """Read ranks such as 0-3,6. Raises UserError if they are malformed."""
    if not RANKS.fullmatch(text):
        raise UserError(f"{text!r} is not a list of ranks: write it as 0-3,6")
    ranks = []
    for word in text.split(","):
        first, _, last = word.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    return tuple(ranks)


def shape_from(text: str, default: Shape) -> Shape:
    """Read 0-3:tp2, where other sizes are 1, or 0-3, with default sizes. Raises UserError if malformed."""
    ranks, *words = text.split(":")
    sizes = dict.fromkeys(SIZES, 1) if words else {}
    for word in words:
        if not re.fullmatch(f"({'|'.join(SIZES)})[1-9]\\d*", word):
            raise UserError(f"{word!r} is not a size: write it as tp2 or pp2")
        sizes[word[:2]] = int(word[2:])
    return default._replace(ranks=ranks_from(ranks), **sizes)


class PartlyColocated(Colocated):
    """Engines share ranks with trainers, but some models are on separate ranks."""

    def check(self, placement: Placement, config: Config) -> None:
        algorithm = algorithm_of(config)
        row = f"--algorithm {config.algorithm[0]}"
        if 0 not in placement.engines:
            raise UserError("rank 0 needs an engine, because it saves the position in the prompts")
        if "critic" in placement.shapes and not algorithm.critics:
            raise UserError(f"{row} has no critic")
        if "critic" in placement.shapes and schedule_of(config).fuses:
            raise UserError(
                f"--schedule {config.schedule} needs actor and critic on the same ranks"
            )
        if "reference" in placement.shapes and not algorithm.kl_coef:
            raise UserError(f"{row} without kl_coef has no reference")
        super().check(placement, config)

    def stand_in(self, config: Config, model: str, shape: Shape, **how: Any) -> Elsewhere:
        from extras.apart.elsewhere import Elsewhere  # imports Megatron, which takes seconds

        return Elsewhere(config, model, shape, **how)

    def connect(self, senders: list[int], receivers: list[int], timeout_s: float) -> Route | None:
        from extras.apart import push

        return push.connect(senders, receivers, timeout_s) if receivers else None

    async def send_columns(self, world: World, shares: Shares) -> None:
        """Send samples' values and log-probabilities from each copy's lead to the other models' ranks."""
        if len(shares.deals) == 1:
            return
        parcels = {}
        for source, target in itertools.permutations(shares.deals, 2):
            for key, makers in shares.deals[source].copies.items():
                if makers[0] == world.rank:
                    for rank in set(shares.deals[target].copies[key]).difference(makers):
                        parcels.setdefault(rank, {})[key] = shares.samples[key].columns()
        for columns_of in (await world.exchange(parcels)).values():
            for key, columns in columns_of.items():
                shares.samples[key].fill(columns)

    async def gather_metrics(
        self, world: World, stats: dict[str, float], is_asked: bool
    ) -> tuple[dict[str, float], bool]:
        """Gather metrics of models on some ranks, and requests to stop (collective: all ranks)."""
        await world.wait_for_all()
        for of_rank, was_asked in await world.gather((stats, is_asked)):
            stats = stats | of_rank
            is_asked = is_asked or was_asked
        return stats, is_asked


class Apart(PartlyColocated):
    """No rank both serves and trains. Engines sleep only during a push."""

    stops_serving = False  # because other ranks may be training
    serves_ahead = True

    async def to_training(self, devices: Devices) -> None:
        """Leave the engines awake."""

    async def to_serving(self, devices: Devices) -> None:
        """Put all engines to sleep, which served until now, and push (collective: all ranks)."""
        await devices.put_engines_to_sleep()
        await devices.push(actor_stays=True)


def colocation_of(placement: Placement) -> Colocated:
    return Apart() if placement.is_apart else PartlyColocated()


PLACEMENTS["split"] = critics_apart
PLACEMENTS["standalone"] = standalone
PLACEMENTS["ranks"] = placement_from
