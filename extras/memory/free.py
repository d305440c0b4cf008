"""The memory that this machine, or our container, has left."""

from pathlib import Path

import psutil

GROUPS = Path("/proc/self/cgroup")  # lines number:controllers:path
LIMITS = Path("/sys/fs/cgroup")
# files in a group's folder with its limit and usage, and the statistic of droppable file pages
VERSION_2 = ("memory.max", "memory.current", "inactive_file")
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_memory() -> float:
    """Return the bytes that processes here can still take: the machine's, or fewer under a limit."""
    left = [psutil.virtual_memory().available]
    for line in GROUPS.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            home = LIMITS / controllers
            folder = home / path.lstrip("/")
            names = VERSION_1 if controllers else VERSION_2
            # a container may see its own group as the outermost one, whatever its path
            for group in (folder, *folder.parents):
                if group.is_relative_to(home) and (group / names[0]).is_file():
                    left.append(left_in(group, *names))
    return min(left)


def left_in(group: Path, limit: str, taken: str, dropped: str) -> float:
    statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    most = float((group / limit).read_text().replace("max", "inf"))
    return most - int((group / taken).read_text()) + int(statistics[dropped])
