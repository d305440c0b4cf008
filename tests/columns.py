"""Which columns of metrics.jsonl depend on timing: runs of one seed agree in all others."""

PREFIXES = ("time/", "perf/", "occupancy/", "split/", "faults/")
NAMES = {
    "rollout/tokens",
    "rollout/tokens_carried",
    "rollout/carried_groups",
    "rollout/moved",
    "rollout/aborted",
    "rollout/cache_hit_frac",
}
NAMES |= {
    "genrm/tokens",
    "genrm/response_len_max",
    "genrm/cache_hit_frac",
    "genrm/p50_s",
    "genrm/p99_s",
    "genrm/timeouts",
}
NAMES |= {"train/seconds_spread", "train/bubble_frac"}


def timing_free(row: dict) -> dict:
    """A row of metrics.jsonl without what depends on timing, on the mode, and on who served what."""
    return {
        name: value
        for name, value in row.items()
        if not name.startswith(PREFIXES) and name not in NAMES
    }
