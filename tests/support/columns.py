"""Columns of metrics.jsonl: as worked out by hand, and those that depend on timing."""

from fractions import Fraction

PREFIXES = ("time/", "perf/", "occupancy/", "split/")
NAMES = "rollout/tokens rollout/tokens_carried rollout/carried_groups rollout/moved rollout/aborted"
NAMES += " rollout/cache_hit_frac genrm/tokens genrm/response_len_max genrm/cache_hit_frac"
NAMES += " genrm/p50_s genrm/p99_s train/seconds_spread environment/step_s"


def timing_free(row: dict) -> dict:
    """Return a row of metrics.jsonl without what depends on timing, on the mode, or on who served what."""
    names = {name for name in row if not name.startswith(PREFIXES)} - set(NAMES.split())
    return {name: value for name, value in row.items() if name in names}


def numbers(text: str) -> dict[str, float]:
    """Read `name=number` words; a number may be a fraction."""
    words = (word.split("=") for word in text.split())
    return {name: float(Fraction(number)) for name, number in words}
