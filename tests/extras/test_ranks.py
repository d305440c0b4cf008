"""Ranks that a launcher forks are to torchrun, and to their files, as those that it starts."""

import json
import os
import subprocess
import sys

from tests import ROOT
from tests.support.patience import LIMIT_S

FACTS = """
import json, logging, os, signal, sys
from pathlib import Path

sys.path.append({root!r})
from runtime import rendezvous

rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
OF_TORCHRUN = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "TORCHELASTIC_RESTART", "OMP_")
handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)]
files = [name for name in os.listdir("/proc/self/fd") if int(name) > 2]
facts = dict(
    arguments=sys.argv[1:],
    name=__name__,
    folder=sys.path[0],
    is_a_session=os.getsid(0) == os.getpid(),
    launcher=os.getppid(),
    variables={name: os.environ[name] for name in os.environ if name.startswith(OF_TORCHRUN)},
    handlers=[*map(int, handlers)],
    files=len(files),  # the folder that is listed
    logs=logging.getLogger("a library").isEnabledFor(logging.ERROR),
    meets_in=rendezvous.launcher_folder().name.rpartition("-")[2],
    heard=sys.stdin.readline() if rank == "0" else "",
)
Path(sys.argv[1], f"{rank}-{attempt}.json").write_text(json.dumps(facts))
print("whole", end="", flush=True)
sys.excepthook = lambda *error: print(*error[1].args, "by the hook", file=sys.stderr)
if rank == "1" and attempt == "0":
    raise ValueError("a reason")
"""
LAUNCH = ("--standalone", "--max-restarts", "1", "--nproc-per-node", "2", "--redirects", "1:1")


def launch(program: tuple[str, ...], folder, script) -> tuple[dict, str]:
    """Run the script under a launcher; return its facts by rank and attempt, and what it printed."""
    folder.mkdir()
    command = [*program, *LAUNCH, "--log-dir", folder / "logs", script, folder, "--flag"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    how = dict(cwd=ROOT, env=environment, input="a line\n", capture_output=True, text=True)
    ran = subprocess.run([*map(str, command)], timeout=LIMIT_S, **how)
    assert ran.returncode == 0, ran.stderr
    assert "a reason by the hook" in ran.stderr
    assert len([*folder.rglob("stdout.log")]) == 2, "rank 1's output of two attempts"
    assert all(log.read_text() == "whole" for log in folder.rglob("stdout.log"))
    facts = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    for each in facts.values():
        each["arguments"][0] = "folder"
    assert len({each.pop("launcher") for each in facts.values()}) == 1
    return facts, ran.stdout


def test_a_forked_rank_is_as_one_that_was_started(tmp_path):
    """Its session, arguments, variables, signals, files and output, also after a restart."""
    script = tmp_path / "mine.py"
    script.write_text(FACTS.replace("{root!r}", repr(str(ROOT))))
    started = launch((sys.executable, "-m", "torch.distributed.run"), tmp_path / "started", script)
    forked = launch((sys.executable, "examples/quiet_torchrun.py"), tmp_path / "forked", script)
    assert forked == started
