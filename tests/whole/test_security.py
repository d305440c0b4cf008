"""Security: loopback and a key on a real run, a model's own code, control characters."""

import io
import json
import sys
import urllib.error
import urllib.request
from contextlib import suppress

import psutil
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from config import parse_config
from engines.server import server_flags
from inputs import tokenization
from runtime.errors import printable
from tests.support.launched import Run
from tests.support.models import save_model
from tests.support.patience import LIMIT_S, run_process

SMALL = ("--prompts-per-step", "4", "--answers-per-prompt", "4", "--max-new-tokens", "12")
# torchrun's own store listens on every interface, unless it is a file and isn't shared with the ranks
CLOSED = ("--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file")
PROBES = ("/health", "/ready", "/metrics")  # prefixes of paths that SGLang leaves open


@given(st.text())
@example("\x1b[2J\x1b]0;title\x07\r\x9b1A\u202e\u2028\ud800")
def test_what_a_terminal_sees_is_printable(text):
    """No control character but line ends and tabs may remain, nor what can't be encoded; the rest stays."""
    shown = printable(text)
    assert all(c.isprintable() or c in "\n\t" for c in shown)
    assert printable(shown) == shown == shown.encode().decode()
    harmless = all(c.isprintable() or c in "\n\t" for c in text)
    assert (shown == text) == harmless


@pytest.mark.parametrize("encoding", ["ascii", "iso-8859-1", "utf-8"])
def test_what_a_terminal_cannot_encode_is_escaped(monkeypatch, encoding):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    print(printable("caf\xe9 \u7b54"), flush=True)
    monkeypatch.undo()
    kept = {"ascii": r"caf\xe9 \u7b54", "iso-8859-1": "caf\xe9 \\u7b54", "utf-8": "caf\xe9 \u7b54"}
    kept = kept[encoding]
    assert stream.buffer.getvalue().decode(encoding) == f"{kept}\n"


TOKENIZER_CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast
Path({mark!r}).touch()

class Own(PreTrainedTokenizerFast):
    pass
"""


def test_a_tokenizers_own_code_never_runs(tmp_path, monkeypatch):
    """The directory names a class of its own, and its module would leave a mark when imported."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    home, mark = save_model(tmp_path / "model"), tmp_path / "mark"
    settings = json.loads((home / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}, "tokenizer_class": "Own"}
    (home / "tokenizer_config.json").write_text(json.dumps(settings))
    (home / "own.py").write_text(TOKENIZER_CODE.format(mark=str(mark)))
    with suppress(ValueError):  # it may refuse the directory, or use the class that it knows
        tokenization.load_tokenizer(str(home))
    assert not mark.exists()
    AutoTokenizer.from_pretrained(home, trust_remote_code=True)  # trusting it would run it
    assert mark.exists()


def test_a_server_is_told_to_trust_no_code_and_no_pickle(tmp_path):
    """No setting may enable it; weights come from safetensors."""
    flags = server_flags("genrm", 1, 23030, save_model(tmp_path / "model"), parse_config([]))
    assert "--trust-remote-code" not in flags
    assert flags[flags.index("--load-format") + 1] == "safetensors"
    assert flags[flags.index("--host") + 1] == "127.0.0.1"


# the module as a child that CUDA spawns imports it; who gets an answer; the search for a model's class
SERVER_MODULE = """
import runpy, sys
from types import SimpleNamespace
server = runpy.run_module("engines.server_main", run_name="__mp_main__")
from sglang.srt.entrypoints import http_server
import asyncio
guard = server["KeyGuard"](http_server.app, "secret")
async def answer(kind, host, key):
    async def receive():
        return {"type": f"{kind}.request"}
    async def send(message):
        print(message.get("status", message["type"]), end=" ")
    headers = [(b"host", host), (b"authorization", b"Bearer " + key)]
    scope = {"type": kind, "path": "/no_such_path", "headers": headers, "query_string": b""}
    scope |= {"method": "POST", "http_version": "1.1", "scheme": "http", "root_path": ""}
    await guard(scope, receive, send)
for asked in (("http", b"a"), ("http", b"a/health?"), ("http", b"a:1/ready#"), ("websocket", b"a")):
    asyncio.run(answer(*asked, b"other"))
asyncio.run(answer("http", b"a", b"secret"))
from sglang.srt.model_loader import utils
hf = SimpleNamespace(auto_map={"AutoModel": "own.Own"})
named = dict(hf_config=hf, hf_text_config=hf, model_path=sys.argv[1], revision=None)
kind = dict(is_generation=True, is_multimodal=False, model_impl=utils.ModelImpl.AUTO)
utils.resolve_transformers_arch(SimpleNamespace(**named, **kind), ["OwnForCausalLM"])
"""


@pytest.fixture(scope="module")
def server_module(tmp_path_factory):
    """Run SERVER_MODULE for a directory whose own.py leaves a mark; return output, error and mark."""
    home = tmp_path_factory.mktemp("home")
    (home / "own.py").write_text(TOKENIZER_CODE.format(mark=str(home / "mark")))
    ran = run_process(sys.executable, "-c", SERVER_MODULE, home)
    return ran.stdout, ran.stderr, home / "mark"


def test_a_models_own_code_never_runs_in_a_server(server_module):
    """SGLang would import it, whatever its flags."""
    _, error, mark = server_module
    assert "loading the custom model from auto_map failed" in error.splitlines()[-1]
    assert not mark.exists()


def test_a_server_asks_for_the_key_whatever_the_host_header_says(server_module):
    """Host: a/health? makes a URL with an open path, if Starlette is old; a websocket must be closed."""
    refused = "401 http.response.body " * 3 + "websocket.close"
    assert server_module[0].strip() == f"{refused} 404 http.response.body"


def look(run, seen):
    """Add what can be seen of the run: command line -> addresses that it listens on, or bound for UDP."""
    for process, command in list(run.processes()):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            found = seen.setdefault(command, set())
            for socket in process.net_connections("inet"):
                is_bound = not socket.raddr and socket.laddr and socket.status == psutil.CONN_NONE
                if socket.status == psutil.CONN_LISTEN or is_bound:
                    found.add(tuple(socket.laddr))


def ask(port, method, path, key):
    """Return HTTP status and text of an empty request."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = f"http://127.0.0.1:{port}{path}"
    request = urllib.request.Request(url, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def refusals(port, key):
    """Return HTTP statuses without a key and with a wrong one, for all routes of a server but the probes."""
    paths = json.loads(ask(port, "GET", "/openapi.json", key)[1])["paths"]
    routes = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    routes = [(method, path.replace("{", "").replace("}", "")) for method, path in routes]
    routes += [("GET", "/openapi.json"), ("GET", "/docs"), ("GET", "/nowhere")]
    routes = [route for route in routes if not route[1].startswith(PROBES)]
    assert len(routes) > 50
    return {ask(port, *route, wrong)[0] for route in routes for wrong in (None, "0" * 64)}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Run the demo; return what was seen, its key, and what its servers refuse."""
    folder, seen = tmp_path_factory.mktemp("run"), {}
    run = Run(folder, *SMALL, "--steps", 12, launch=CLOSED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        run.start()
    try:
        run.wait_for(lambda run: look(run, seen) or run.rows())
        words = "forks.log engines.server_main"
        servers = [process for process, command in run.processes() if words in command]
        [key] = {process.environ()["NANOYATT_API_KEY"] for process in servers}
        refused = refusals(run.port, key) | refusals(run.port + 3, key)
        look(run, seen)
        assert run.is_running()
    finally:
        run.finish()
    assert run.status == 0, run.stderr + run.stdout
    run.check_nothing_is_left()
    return run, seen, key, refused


@pytest.mark.slow
def test_nobody_comes_in_without_the_key(served):
    """It must be in no command line and no file; every socket is on loopback from its first moment."""
    run, seen, key, refused = served
    assert refused <= {401, 403}
    assert len(key) == 64 and not any(key in command for command in seen)
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert len(files) > 8 and not any(key.encode() in path.read_bytes() for path in files)
    addresses = {address for found in seen.values() for address in found}
    assert {ip for ip, _ in addresses} == {"127.0.0.1"}, seen
    assert {run.port, run.port + 3} <= {port for _, port in addresses}
