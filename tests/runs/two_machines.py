"""Two machines simulated on one: namespaces joined by a virtual cable, and a run of the demo over both.

Needs root. Each machine has its own address, hostname, process ids and shared memory. They share the disk
except for TMPDIR, and they end with this process, however it ends.
"""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests import ROOT
from tests.support.launched import Run
from tests.support.patience import LIMIT_S

PORT = 26000  # the run's --port; each machine has its own
MEETING_PORT = 26400  # where torchruns meet


class Machine:
    """A machine with its own network, hostname, process and mount namespaces; they end with its init."""

    def __init__(self, name, address, folder):
        self.name, self.address, self.folder = name, address, folder / name
        self.log = self.folder / "log"
        self.folder.mkdir(exist_ok=True)
        hosts = self.folder / "hosts"
        hosts.write_text(f"127.0.0.1 localhost\n{address} {name}\n")
        within = f"hostname {name} && mount --bind {hosts} /etc/hosts"
        within += " && mount -t tmpfs tmpfs /dev/shm && ip link set lo up && echo up"
        within += " && { sleep infinity & wait; }"  # reaps orphans
        own = ("--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", *own, "sh", "-c", within]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._unshare = subprocess.Popen(command, **pipes)
        if (said := self._unshare.stdout.readline().strip()) != "up":
            self.close()
            raise PermissionError(said)
        [self.init] = psutil.Process(self._unshare.pid).children()

    def command(self, *words):
        """Return the command that runs these words on the machine."""
        into = ("--net", "--uts", "--mount", "--pid", f"--wd={ROOT}")
        return ["nsenter", "--target", str(self.init.pid), *into, *map(str, words)]

    def family(self):
        """Return the processes started on the machine: (process, command line)."""
        mine = os.stat(f"/proc/{self.init.pid}/ns/pid").st_ino
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, PermissionError):
                command = " ".join(process.cmdline())
                is_ours = process == self.init or command == "sleep infinity"
                if os.stat(f"/proc/{process.pid}/ns/pid").st_ino == mine and not is_ours:
                    yield process, command

    def listening(self):
        """Return ADDRESS:PORT of the machine's listening sockets and bound UDP sockets."""
        said = subprocess.run(self.command("ss", "-Hlntu"), capture_output=True, text=True).stdout
        return {line.split()[4] for line in said.splitlines()}

    def close(self):
        # --kill-child kills the init, and with it everything inside
        self._unshare.kill()
        self._unshare.wait()
        self._unshare.stdout.close()


@contextlib.contextmanager
def two_machines(folder):
    """Make two machines and a cable between them. Raises PermissionError if the user or system may not."""
    subnet = f"10.{os.getpid() // 250 % 250 + 1}.{os.getpid() % 250 + 1}"
    machines = []
    try:
        for number, name in enumerate(("first", "second"), start=1):
            machines.append(Machine(name, f"{subnet}.{number}", folder))
        connect(machines)
        yield machines
    finally:
        for machine in machines:
            machine.close()


def connect(machines):
    """Lay the cable; it disappears with either machine."""
    ends = [f"name cable netns {machine.init.pid}".split() for machine in machines]
    subprocess.run(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]], check=True)
    for machine in machines:
        for words in (f"address add {machine.address}/24 dev cable", "link set cable up"):
            subprocess.run(machine.command("ip", *words.split()), check=True)


def replace_second(machines):
    """Kill the second machine like a power failure, with connections left open; start one with its name."""
    old = machines[1]
    old.close()
    # unless it is gone already
    subprocess.run(machines[0].command("ip", "link", "delete", "cable"), check=False)
    machines[1] = Machine(old.name, old.address, old.folder.parent)
    connect(machines)


def on_two(machines, out, arguments, strike_after):
    """Run one rank on each machine; return the run and what listened on which machine.

    The second machine is replaced after `strike_after` steps. The new one gets the same command.
    """
    launchers, deadline = {}, time.monotonic() + LIMIT_S
    seen = {machine.name: set() for machine in machines}
    found, is_struck = Run(out.parent, out=out), False
    try:
        while not launchers or any(each.poll() is None for each in launchers.values()):
            assert time.monotonic() < deadline, f"not done in time: {said(machines)}"
            for machine in machines:
                if machine not in launchers:
                    launchers[machine] = start(machine, machines[0], out, arguments)
                seen[machine.name] |= machine.listening()
            if not is_struck and len(found.rows()) >= strike_after:
                replace_second(machines)
                is_struck = True
            time.sleep(0.2)
    finally:
        for each in launchers.values():
            each.kill()
            each.wait()
    statuses = [launchers[machine].returncode for machine in machines]
    assert is_struck and statuses == [0, 0], said(machines)
    return found, seen


def start(machine, first, out, arguments):
    """Start torchrun on one of the machines."""
    command = [Path(sys.executable).with_name("torchrun"), "--nnodes", 2, "--nproc-per-node", 1]
    command += ["--max-restarts", 2, "--local-addr", machine.address, "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", f"{first.address}:{MEETING_PORT}", "run.py", *arguments]
    command += ["--host", machine.address, "--port", PORT, "--out", out]
    environment = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment |= {"TMPDIR": str(machine.folder)}
    with machine.log.open("ab") as log:
        how = dict(cwd=ROOT, env=os.environ | environment, stdout=log, stderr=log)
        return subprocess.Popen(machine.command(*command), **how)


def said(machines):
    logs = [f"\n--- {machine.name}:\n{machine.log.read_text()[-3000:]}" for machine in machines]
    return "".join(logs)
