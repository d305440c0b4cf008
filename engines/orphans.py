"""Orphans: servers that a run left behind, found by the files in which it noted them and told from strangers by when they began.

A server dies with the rank that owns it, so there should be none. What is left all the same (a kernel that didn't pass the signal on, a
rank that was frozen) would hold ports and devices against the next run.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil

PATIENCE_S = 10.0  # for a killed server to be gone
SAME_S = 1.0  # two readings of when a process began may differ by so much: the clock between them may have been set


def note(path: Path, pid: int) -> None:
    """Write down which process serves, which owns it (this one), and since when: a process id alone may be another's by tomorrow."""
    server, owner = psutil.Process(pid), psutil.Process()
    facts = {"pid": pid, "born": server.create_time(), "owner": owner.pid, "owner_born": owner.create_time()}
    written = path.with_suffix(".part")
    written.write_text(json.dumps(facts))
    written.rename(path)  # whole or not at all


def end_orphans(out: Path) -> list[str]:
    """End the servers of an earlier run in `out`, each with its process group; returns a line for each.

    Raises ValueError if the process that owns one is alive: then that run isn't over, and nothing of it may be touched.
    """
    noted = {path: json.loads(path.read_text()) for path in sorted((out / "logs").glob("*.pid"))}
    for facts in noted.values():
        if living(facts["owner"], facts["owner_born"]):
            raise ValueError(f"--out {out}: a run is at work there (process {facts['owner']}): stop it, or choose another --out")
    lines = []
    for path, facts in noted.items():
        server = living(facts["pid"], facts["born"])
        if server is not None and os.getpgid(server.pid) == server.pid:  # launched as the leader of a group of its own
            os.killpg(server.pid, signal.SIGKILL)
            gone_by = time.monotonic() + PATIENCE_S
            while living(facts["pid"], facts["born"]):  # it holds the port; not Process.wait, which waits for a zombie's parent, too
                if time.monotonic() > gone_by:
                    raise ValueError(f"process {server.pid}, a server that an earlier run left, doesn't end: {path}")
                time.sleep(0.02)
            lines.append(f"ended process {server.pid}, a server that an earlier run left: {path.stem}")
        path.unlink()
    return lines


def living(pid: int, born: float) -> psutil.Process | None:
    """The process of this id that began then, if it runs."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - born) < SAME_S and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    return process if same else None
