"""An estimate of a run's memory on GPUs; a run that needs more than a device has starts nothing."""

from config import Config
from extras.memory import estimate
from runtime.devices import FULL, free_bytes
from runtime.errors import UserError
from runtime.world import World
from scheduling.layout import Placement
from scheduling.measured import Split

# sizes of devices, tried in order if there is none here; torch finds 85.0 GB in one sold as 80
SIZES = (24e9, 48e9, 85e9, 141e9)


def device_peaks(
    config: Config, placement: Placement, splits: list[Split]
) -> tuple[float, dict[str, float]]:
    """Return a device's bytes and each phase's peak. Without a device here: of the least that is enough."""
    from torch import cuda

    for size in [free_bytes()] if cuda.is_available() else SIZES:
        peaks = estimate.peaks_of(config, placement, splits, size)
        if max(peaks.values()) <= FULL * size:
            break
    return size, peaks


def table(config: Config, placement: Placement, splits: list[Split]) -> list[str]:
    """Return the lines of --dry-run: a rank's part of each model, then a device's peak in each phase."""
    lines = ["  estimated MB of memory, for a rank's part or for an engine on each of its ranks:"]
    trainers = estimate.trainers_of(config, placement)
    for name, model in (trainers | estimate.engines_of(config, placement, splits)).items():
        each = ", ".join(f"{part} {size / 1e6:.1f}" for part, size in model.parts.items())
        lines.append(f"    {name}: {each}; together {model.total / 1e6:.1f}")
    if config.device == "cuda":
        size, peaks = device_peaks(config, placement, splits)
        each = ", ".join(f"{phase} {peak / 1e9:.1f}" for phase, peak in peaks.items())
        room = "TOO LITTLE" if max(peaks.values()) > FULL * size else "enough"
        lines.append(f"  estimated GB of a device by phase: {each}")
        lines.append(f"  {FULL} of its {size / 1e9:.1f} GB are used: {room}")
        there = estimate.with_recompute(config, placement, splits, size)
        again = f"--recompute {there.recompute} and {there.kept_chunks} chunks of logits kept"
        lines.append(f"  if {size / 1e9:.1f} GB of a device are free: {again}")
    return lines


def check_fits(config: Config, placement: Placement, splits: list[Split]) -> None:
    """Raise UserError, naming the phase, if a step won't fit a device."""
    if config.device == "cpu" or not config.memory_check:
        return
    size, peaks = device_peaks(config, placement, splits)
    phase = max(peaks, key=peaks.__getitem__)
    if peaks[phase] > FULL * size:
        raise UserError(
            f"{FULL} of a device: the run needs about {peaks[phase] / 1e9:.1f} GB for {phase}, and "
            f"{FULL * size / 1e9:.1f} are free: try more ranks, another --mem-fraction, --recompute -1, "
            "a smaller --max-tokens-per-micro-batch or --max-model-len, --tp with --sp; "
            "--no-memory-check starts anyway"
        )


async def settled(
    config: Config, placement: Placement, splits: list[Split], world: World
) -> Config:
    """Check the run, and return settings that fit its smallest GPU (collective: all ranks)."""
    config = await world.run(estimate.with_micro_batch, config)
    check_fits(config, placement, splits)
    if config.device == "cpu":
        return config
    least = min(await world.gather(free_bytes()))
    return estimate.with_recompute(config, placement, splits, least)
