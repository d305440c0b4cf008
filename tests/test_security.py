"""Who can come in: loopback and a key on a real run, a model's own code, control characters, old servers."""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import redirect_stdout, suppress

import psutil
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoTokenizer

import data
from config import parse_config, printable
from engines.fleet import Fleet
from engines.server import end_stale_servers, server_flags, write_pid_file
from fakes import FakeWorld
from launched import PORTS, ROOT, Run
from models import save_model
from reporting.progress import Progress

STEPS = 12  # of the run that is looked at: it must still serve when all has been asked
SMALL = ("--prompts-per-step", "4", "--answers-per-prompt", "4", "--max-new-tokens", "12")
# torchrun's own store listens on every interface, unless it is a file and isn't shared with the ranks
CLOSED = ("--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file")
PROBES = (
    "/health",
    "/ready",
    "/metrics",
)  # how a path begins that SGLang leaves open: whether it lives


# ---------------------------------------------------------------- text from a model


@given(st.text())
@example("\x1b[2J\x1b]0;title\x07\r\x9b1A\u202e\u2028\ud800")
def test_what_a_terminal_sees_is_printable(text):
    """No control character but line ends and tabs, nothing that can't be encoded; other text stays."""
    shown = printable(text)
    assert all(c.isprintable() or c in "\n\t" for c in shown)
    assert printable(shown) == shown == shown.encode().decode()
    harmless = all(c.isprintable() or c in "\n\t" for c in text)
    assert (shown == text) == harmless


def test_the_progress_lines_are_printable():
    """Whatever a note quotes."""
    with redirect_stdout(io.StringIO()) as shown:
        progress = Progress(1, is_main=True)
        progress.line("an answer: \x1b[2Jcleared")
        progress.close()
    assert shown.getvalue() == "an answer: \\x1b[2Jcleared\n"


# ---------------------------------------------------------------- a model's own code

TOKENIZER_CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast
Path(__file__).with_name("ran").touch()
Path({mark!r}).touch()

class Own(PreTrainedTokenizerFast):
    pass
"""


def test_a_tokenizers_own_code_never_runs(tmp_path, monkeypatch):
    """The directory names a class of its own, whose module leaves a mark when it is imported."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    home, mark = save_model(tmp_path / "model"), tmp_path / "mark"
    settings = json.loads((home / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}, "tokenizer_class": "Own"}
    (home / "tokenizer_config.json").write_text(json.dumps(settings))
    (home / "own.py").write_text(TOKENIZER_CODE.format(mark=str(mark)))
    with suppress(ValueError):  # it may refuse the directory, or take the class that it knows
        data.load_tokenizer(str(home))
    assert not mark.exists()
    AutoTokenizer.from_pretrained(home, trust_remote_code=True)  # who trusts it would have run it
    assert mark.exists()


def test_a_server_is_told_to_trust_no_code_and_no_pickle(tmp_path):
    """No setting asks for it; weights come from safetensors."""
    home = save_model(tmp_path / "model")
    flags = server_flags("genrm", 1, 23030, home, parse_config([]))
    assert (
        "--trust-remote-code" not in flags
        and flags[flags.index("--load-format") + 1] == "safetensors"
    )
    assert flags[flags.index("--host") + 1] == "127.0.0.1"


WEBSOCKETS = """
from cpu import sglang
library = sglang.install()
from sglang.srt.entrypoints import http_server
from starlette.routing import WebSocketRoute

def count():
    routes = http_server.app.router.routes
    return sum(isinstance(route, WebSocketRoute) for route in routes), len(routes)

before = count()
sglang.drop_websockets(http_server.app)
print(*before, *count())
"""


def test_a_server_has_no_websocket():
    """SGLang's has, and doesn't ask it for the key; nothing else is taken away."""
    ran = subprocess.run(
        [sys.executable, "-c", WEBSOCKETS], cwd=ROOT, capture_output=True, text=True
    )
    sockets, routes, left, routes_left = map(int, ran.stdout.split())
    assert sockets > 0 and left == 0 and routes_left == routes - sockets


# ---------------------------------------------------------------- servers that an earlier run left

SERVER = "import subprocess, time; subprocess.Popen(['sleep', '600']); "
SERVER += "print('up', flush=True); time.sleep(600)"


@pytest.fixture
def left(tmp_path):
    """A server of two processes in a group of its own, as an engine starts it, and the file that notes it."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert server.stdout.readline() == "up\n"
    (tmp_path / "logs").mkdir()
    path = tmp_path / "logs" / "genrm-1.pid"
    write_pid_file(path, server.pid)
    yield server, path
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def changed(path, **more):
    path.write_text(json.dumps(json.loads(path.read_text()) | more))


def test_a_server_whose_owner_is_gone_is_ended_with_its_group(left, tmp_path):
    """A line names it, its file goes, and a second look finds nothing."""
    server, path = left
    child = psutil.Process(server.pid).children()[0]
    changed(path, owner_born=0.0)  # the owner's process id is another's by now
    assert end_stale_servers(tmp_path) == [
        f"ended process {server.pid}, a server that an earlier run left: genrm-1"
    ]
    assert server.wait(5) == -signal.SIGKILL and not path.exists()
    psutil.wait_procs([child], 5)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert end_stale_servers(tmp_path) == []


def test_a_process_that_began_at_another_time_is_not_ours(left, tmp_path):
    """A process id is used again: what stands behind it now is spared."""
    server, path = left
    changed(path, owner_born=0.0, born=json.loads(path.read_text())["born"] - 60)
    assert end_stale_servers(tmp_path) == []
    assert server.poll() is None and not path.exists()


def test_a_run_that_is_not_over_is_not_touched(left, tmp_path):
    """Its owner lives (this process): one sentence, nothing ended, the note stays."""
    server, path = left
    with pytest.raises(
        ValueError, match=f"--out {tmp_path}: a run is at work there .process {os.getpid()}."
    ):
        end_stale_servers(tmp_path)
    assert server.poll() is None and path.exists()


def test_what_another_machine_noted_is_its_own(left, tmp_path):
    """In a shared --out: the process ids there name others here."""
    server, path = left
    changed(path, owner_born=0.0, machine="another")
    assert end_stale_servers(tmp_path) == []
    assert server.poll() is None and path.exists()


def test_a_note_that_another_machine_removes_meanwhile_is_passed_over(left, tmp_path):
    """It is in the list of files, and gone when it is read."""
    (tmp_path / "logs" / "genrm-0.pid").symlink_to(tmp_path / "gone")
    server, path = left
    changed(path, owner_born=0.0)
    assert len(end_stale_servers(tmp_path)) == 1 and server.wait(5) == -signal.SIGKILL


# ---------------------------------------------------------------- real runs of half the loop


def listening(process):
    """Addresses of a process's listening sockets, and of UDP sockets that are bound."""
    for socket in process.net_connections("inet"):
        if socket.status == psutil.CONN_LISTEN or (
            not socket.raddr and socket.laddr and socket.status == psutil.CONN_NONE
        ):
            yield socket.laddr.ip, socket.laddr.port


def look(run, seen):
    """Add what can be seen of the run now: command line -> listening addresses."""
    for process, command in list(run.processes()):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            seen.setdefault(command, set()).update(listening(process))


def ask(port, method, path, key=None):
    """HTTP status of an empty request."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", method=method, headers=headers
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def refusals(port, key):
    """(method, path) -> HTTP statuses without a key and with a wrong one, for every route of a server."""
    status, text = ask(port, "GET", "/openapi.json", key)
    assert status == 200, text
    paths = {
        path.replace("{", "").replace("}", ""): methods
        for path, methods in json.loads(text)["paths"].items()
    }
    routes = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    routes += [
        ("GET", "/openapi.json"),
        ("GET", "/docs"),
        ("GET", "/nowhere"),
        ("POST", "/generate"),
    ]
    return {
        route: (ask(port, *route)[0], ask(port, *route, "0" * 64)[0])
        for route in routes
        if not route[1].startswith(PROBES)
    }


@pytest.fixture(scope="module")
def looked_at(tmp_path_factory):
    """A --rollout-only run of the demo, what was seen of it, and the --train-only run on its replay."""
    home, seen, facts, trained = tmp_path_factory.mktemp("run"), {}, {}, {}
    run = Run(home / "serve", *SMALL, "--rollout-only", "--steps", STEPS, launch=CLOSED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        run.start()
    try:
        run.wait_for(lambda run: look(run, seen) or run.rows())
        servers = [(p, command) for p, command in run.processes() if "cpu.sglang" in command]
        [facts["key"]] = {p.environ()["NANOYATT_API_KEY"] for p, _ in servers}
        ports = (run.port, run.port + 3)
        facts["refused"] = {port: refusals(port, facts["key"]) for port in ports}
        look(run, seen)
        facts["was serving"] = run.is_running()
    finally:
        run.finish()
    replay = ("--train-only", "--replay", run.out / "replay.jsonl")
    train = Run(home / "train", *SMALL, *replay, "--steps", "3").start()
    try:
        train.wait_for(lambda run: look(run, trained) or (run.out / "trace.json").exists())
    finally:
        train.finish()
    return run, seen, facts, train, trained


@pytest.mark.slow
def test_it_ran(looked_at):
    """Both halves end well, with nothing left behind, no note of a process either."""
    run, _, _, train, _ = looked_at
    for each in (run, train):
        assert each.status == 0, each.stderr + each.stdout
        each.check_nothing_is_left()
        assert "warning" not in (each.stderr + each.stdout).lower()
    logs = {path.name for path in (run.out / "logs").iterdir()}
    assert logs == {"rollout-0.log", "genrm-1.log"}


@pytest.mark.slow
def test_a_request_without_the_key_is_refused(looked_at):
    """By both servers, on every path, and with a wrong key too. Only SGLang's own probes are open."""
    _, _, facts, _, _ = looked_at
    assert facts["was serving"]
    for refused in facts["refused"].values():
        assert len(refused) > 50
        statuses = {status for pair in refused.values() for status in pair}
        assert statuses <= {401, 403}, refused


@pytest.mark.slow
def test_the_key_is_nowhere_to_be_read(looked_at):
    """One key a run, in no command line and in no file that the run left."""
    run, seen, facts, _, _ = looked_at
    key = facts["key"]
    assert len(key) == 64 and not any(key in command for command in seen)
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert len(files) > 8 and not any(key.encode() in path.read_bytes() for path in files)


@pytest.mark.slow
def test_every_socket_is_on_loopback(looked_at):
    """Of all processes of a run, from their first moment; torchrun's too, if told so: its store is open."""
    run, seen, _, train, trained = looked_at
    for word in ("cpu.sglang", "bin/torchrun"):
        assert any(word in command for command in seen)
    addresses = {address for found in seen.values() for address in found}
    assert {ip for ip, _ in addresses} == {"127.0.0.1"}, seen
    assert {run.port, run.port + 3} <= {port for _, port in addresses}
    by_default = {
        command: ports
        for command, found in trained.items()
        if (ports := {port for ip, port in found if ip != "127.0.0.1"})
    }
    assert all("bin/torchrun" in command for command in by_default), trained
    assert set().union(*by_default.values()) == {train.port + PORTS - 1}  # --master-port


@pytest.mark.slow
def test_training_alone_trains_on_what_was_served_alone(looked_at):
    """No server is started; every token is trained on; from the second step on with stale tokens."""
    run, _, _, train, trained = looked_at
    assert not any("cpu.sglang" in command for command in trained)
    rows = run.rows("replay.jsonl")
    assert {version for row in rows for version in row["versions"]} == {0}
    assert f"--train-only --replay {run.out / 'replay.jsonl'}" in run.stdout
    first = rows[0]["step"]  # the steps of training are counted from it
    metrics = train.rows()[:3]
    assert [row["step"] for row in metrics] == [0, 1, 2]
    for step, row in enumerate(metrics):
        tokens = sum(len(each["response"]) for each in rows if each["step"] == first + step)
        assert row["train/tokens"] == tokens and (row["train/grad_norm"] > 0) == (tokens > 0)
        assert row["train/stale_token_frac"] == float(step > 0 and tokens > 0)
    assert 0 < metrics[0]["train/engine_logprob_diff_max"] <= 1e-4


def test_a_second_run_in_the_same_place(tmp_path, monkeypatch):
    """Is refused while the owner of a server of the first lives: this process."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    note = tmp_path / "out" / "logs" / "rollout-0.pid"
    note.parent.mkdir(parents=True)
    sleeper = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        write_pid_file(note, sleeper.pid)
        with pytest.raises(ValueError, match="a run is at work there"):
            asyncio.run(end_stale(tmp_path / "out"))
        assert sleeper.poll() is None
        changed(note, owner_born=0.0)
        assert asyncio.run(end_stale(tmp_path / "out")) == [f"ended process {sleeper.pid}"]
        assert sleeper.wait(5) == -signal.SIGKILL
    finally:
        sleeper.kill()
        sleeper.wait()


async def end_stale(out):
    """What a Fleet says, that begins there, up to the first comma."""
    said, config = [], parse_config(["--out", str(out)])
    async with Fleet(config, FakeWorld(0, 1, {})) as fleet:
        await fleet.end_stale(said.append)
    return [line.split(",")[0] for line in said]
