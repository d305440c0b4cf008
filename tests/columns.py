"""Which columns of metrics.jsonl depend on timing: runs of one seed agree in all others."""

PREFIXES = ("time/", "perf/", "occupancy/", "split/", "faults/")
NAMES = "rollout/tokens rollout/tokens_carried rollout/carried_groups rollout/moved rollout/aborted"
NAMES += " rollout/cache_hit_frac genrm/tokens genrm/response_len_max genrm/cache_hit_frac"
NAMES += " genrm/p50_s genrm/p99_s genrm/timeouts train/seconds_spread train/bubble_frac"


def timing_free(row: dict) -> dict:
    """A row of metrics.jsonl without what depends on timing, on the mode, and on who served what."""
    names = {name for name in row if not name.startswith(PREFIXES)} - set(NAMES.split())
    return {name: value for name, value in row.items() if name in names}
