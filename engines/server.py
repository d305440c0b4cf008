"""An SGLang server's process: flags, start, end. Doesn't import sglang, which takes 6 s."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from config import Config
from inputs.hf_directory import read_model_config, sees
from runtime import rendezvous
from runtime.devices import cuda_home, cuda_libraries
from runtime.errors import UserError
from runtime.hooks import HOOKS, added
from runtime.parent import PARENT
from runtime.shutdown import starting_deaf
from scheduling.measured import ROLES

STREAM_INTERVAL = 32  # tokens between two events of an answer; an engine sends nothing else
SPARE = 6  # tokens of a context that SGLang keeps free; it refuses or cuts off what would need them
KV_TOKENS = 32768  # largest KV cache of an engine without CUDA, unless its context is longer
MOST_COLUMNS = 300  # longest quote from a log line
# SGLang logs these at any end, whatever the cause; a signal leaves only its "exit code -9"
FAREWELL = re.compile(r"exit code \d|SIGQUIT received|crash diagnostics|No live scheduler")
LOG_START = "---- a server starts"  # a log line begins with this at each start
ROOT = Path(__file__).parents[1]
for_us_alone = partial(os.open, mode=0o600)


def port_of(config: Config, rank: int, role: str) -> int:
    """Return the port of a rank's server for a role."""
    return config.port + len(ROLES) * rank + ROLES.index(role)


def server_flags(
    role: str, rank: int, port: int, model_dir: str, config: Config, stride: int = 1
) -> list[str]:
    """Return the server's command line. stride: see ServerSpec. Raises UserError if --model is incomplete."""
    context = engine_context(model_dir, config)
    flags = {
        "model-path": Path(model_dir).resolve(),
        "weight-version": 0,
        "host": config.host,
        "port": port,
        "load-format": "safetensors",  # the default also accepts a .bin, which is a pickle
        "served-model-name": os.getpid(),  # lets `ready` recognize our server
        "dtype": config.dtype,
        "random-seed": (config.seed + rank) % 2**32,  # NumPy's limit
        "context-length": context,
        "max-running-requests": config.max_running_requests,
        "skip-tokenizer-init": None,  # tokens in, tokens out
        "stream-interval": STREAM_INTERVAL,
        "incremental-streaming-output": None,
        # answers reach the judge one by one, and each prefill stalls all decoding: join prefills
        "prefill-decode-interval": 8,
        "prefill-decode-interval-min-bs": 16,
        "skip-server-warmup": None,
        "sleep-on-idle": None,
        "log-level": "error",
    }
    if config.deterministic:
        flags["enable-deterministic-inference"] = None
    if config.device == "cuda":
        flags |= cuda_flags(role, model_dir, config, stride)
    else:
        flags |= cpu_flags(role, context, config)
    if sees(model_dir):
        # Pillow decodes pixels, as in the trainer. Without this cache SGLang turns Qwen2.5-VL's tokens into
        # text and back, and fails on a spelled-out image token
        flags |= {"image-processor-backend": "pil", "mm-preprocess-cache-size-mb": 64}
    command = []
    for flag, value in flags.items():
        command += [f"--{flag}"] if value is None else [f"--{flag}", str(value)]
    return command


def cuda_flags(role: str, model_dir: str, config: Config, stride: int) -> dict[str, Any]:
    """Return the flags of an engine on GPUs: with several ranks, every `stride`th GPU from this rank's on."""
    flags = {
        "base-gpu-id": os.environ["LOCAL_RANK"],
        "mem-fraction-static": config.mem_fraction,
        # the default on a GPU with less than 60 GB decodes more than 48 answers without a graph
        "cuda-graph-max-bs-decode": config.max_running_requests,
        "enable-memory-saver": None,
        # prefill graphs give wrong values (sgl-project/sglang#37606)
        "disable-prefill-cuda-graph": None,
        "watchdog-timeout": config.timeout_s,  # limit for a pass, which may compile kernels
        # logs the attention, KV cache size and CUDA graph time; server_main.py drops the rest
        "log-level": "info",
        "log-level-http": "error",
    }
    if (tp := vars(config)[f"{role}_tp"]) > 1:
        flags |= {"tp-size": tp, "gpu-id-step": stride}
    # flashinfer has no kernels for such heads; the demo's have a dimension of 24
    if head_dim(model_dir) % 32 or head_dim(model_dir) < 64:
        flags["attention-backend"] = "triton"
    if backs_up(role, config):
        flags["enable-weights-cpu-backup"] = None
    return flags


def backs_up(role: str, config: Config) -> bool:
    """True if the host keeps a sleeping engine's weights: a judge, or one that wakes without a push."""
    return role == "genrm" or config.mode != "partial" or config.evaluates


def kv_tokens(context: int, config: Config) -> int:
    """Return the tokens in a KV cache without CUDA: all concurrent requests', up to a limit."""
    return max(context, min(KV_TOKENS, context * config.max_running_requests))


def cpu_flags(role: str, context: int, config: Config) -> dict[str, Any]:
    """Return the flags of an engine without CUDA."""
    return {
        "device": "cpu",
        "tp-size": vars(config)[f"{role}_tp"],
        # cpu/invariance.py patches its attention; deterministic mode would look for a GPU's
        "attention-backend": "torch_native",
        "disable-overlap-schedule": None,
        "max-total-tokens": kv_tokens(context, config),
    }


def server_environment(key: str, private: str, device: str) -> dict[str, str]:
    """Return our environment without the trainers' and torchrun's variables, or SGLang would join our group.

    key: requests must carry it; it is no flag, as anybody can read a command line. private: the server's own
    folder, for sockets and the rendezvous file; by default its processes meet on a port open to anybody.
    """
    ours = ("MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")
    ours += ("CUDA_DEVICE_MAX_CONNECTIONS", "PYTHONSAFEPATH")  # servers wouldn't find our modules
    inherited = os.environ.items()
    environment = {name: value for name, value in inherited if not name.startswith(ours)}
    environment[PARENT] = str(os.getpid())
    environment["NANOYATT_API_KEY"] = key
    environment["PYTHONWARNINGS"] = "ignore"
    environment["TMPDIR"] = private
    environment["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{private}/store"
    if device == "cuda":
        # an awake engine keeps the pinned memory of its backup: pinning 1 or 2 GB takes a second
        environment["TMS_RETAIN_CPU_BACKUP"] = "1"
        # actors and other engines share the devices, so free memory may be unequal
        environment["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
        # it compiles kernels with `ninja`; pip installs that next to Python, which PATH may not list
        environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
        environment["CUDA_HOME"] = cuda_home()
        # the memory saver is preloaded and needs libcudart, which only pip may have installed
        folders = [*cuda_libraries(), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        environment["LD_LIBRARY_PATH"] = ":".join(folders)
    else:
        # otherwise glibc returns large buffers to the kernel, and each step faults their pages in again
        environment["MALLOC_MMAP_THRESHOLD_"] = str(1 << 30)
        environment["MALLOC_TRIM_THRESHOLD_"] = str(1 << 30)
        # unless MKL is strict, products of few rows differ in the last bits on some processors
        environment["MKL_CBWR"] = "AUTO,STRICT"
        environment["OMP_NUM_THREADS"] = "1"
    return environment


def head_dim(model_dir: str) -> int:
    """Return the width of an attention head."""
    found = read_model_config(model_dir)
    found = found.get("text_config", found)  # vision models have one
    return found.get("head_dim") or found["hidden_size"] // found["num_attention_heads"]


def context_length(model_dir: str | Path, config: Config) -> int:
    """Return how many tokens a prompt and its answer may have together. Raises UserError if none is known."""
    return engine_context(model_dir, config) - SPARE


def engine_context(model_dir: str | Path, config: Config) -> int:
    """Return an engine's context in tokens: --max-model-len or the model's own limit."""
    if config.max_model_len:
        return config.max_model_len
    found = read_model_config(model_dir)
    found = found.get("text_config", found)  # vision models have one
    if "max_position_embeddings" not in found:
        raise UserError(
            f"{model_dir}/config.json has no max_position_embeddings: set --max-model-len"
        )
    return found["max_position_embeddings"]


class ServerProcess:
    """A server on this machine: a process group, a log, a private folder. command: a module, its flags."""

    patches: tuple[str, ...] = ()  # this kind's own, besides those of the hook server_patch

    def __init__(self, command: list[str], key: str, log: Path, device: str, environment: dict):
        self._command = command
        self._log = log
        self.device = device
        # SGLang puts sockets there, and a socket's path has at most 107 characters
        how = {"dir": "/tmp" if len(tempfile.gettempdir()) > 49 else None}
        how["prefix"] = f"{rendezvous.PREFIX}{os.getpid()}-"
        self.folder = tempfile.TemporaryDirectory(**how, ignore_cleanup_errors=True)
        rendezvous.hold(Path(self.folder.name))
        self._environment = server_environment(key, self.folder.name, device) | environment
        patches = (*HOOKS["server_patch"].values(), *self.patches)
        self._environment["NANOYATT_PATCHES"] = " ".join(patches)
        self._process: subprocess.Popen | None = None
        log.parent.mkdir(parents=True, exist_ok=True)

    @classmethod
    def prepare(cls) -> None:
        """Prepare this machine for the run's servers, before the ranks meet."""

    @classmethod
    def describe(cls, config: Config) -> str:
        """Return a line on how servers run, or an empty text."""
        return ""

    def start(self) -> None:
        """Start the server. The log keeps earlier servers' lines, which may explain why they ended."""
        how = {"cwd": ROOT, "env": self._environment, "start_new_session": True}
        with open(self._log, "ab", buffering=0, opener=for_us_alone) as log, starting_deaf():
            log.write(f"{LOG_START}, {time.strftime('%F %T')}\n".encode())
            self._process = self._popen(**how, stdout=log, stderr=log)

    def _popen(self, **how: Any) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, "-m", *self._command], **how)

    def exit_status(self) -> str:
        """Return how it ended; empty while it runs."""
        status = self._process.poll()
        if status is None:
            return ""
        if status == -signal.SIGKILL:
            return "signal 9: memory may have run out"
        return f"signal {-status}" if status < 0 else f"exit status {status}"

    async def kill(self) -> None:
        """Kill the process group, and return when it is gone."""
        process = self._process
        if process is None:
            return
        self._process = None
        # it holds nothing worth saving, and its children die with it; SIGTERM would take 5 s
        process.kill()
        process.wait()
        try:
            # multiprocessing's tracker, which exits last, removes the semaphores
            await asyncio.sleep(0.5)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def log_tail(self) -> str:
        return "\n".join((f"the end of {self._log}:", *self._log_lines()[-15:]))

    def log_end(self) -> str:
        """Return one line: the log's path, and its last line that isn't an SGLang farewell."""
        lines = [line for line in self._log_lines() if line.strip() and not FAREWELL.search(line)]
        return f"the end of {self._log}: {lines[-1] if lines else 'nothing'}"

    def _log_lines(self) -> list[str]:
        """Return the lines since the last start, cut to MOST_COLUMNS."""
        newest = self._log.read_text(errors="replace").rpartition(LOG_START)[2]
        return [line[:MOST_COLUMNS] for line in newest.splitlines()[1:]]


def kind_of(device: str) -> type[ServerProcess]:
    """Return how servers start on a device."""
    kinds = [ServerProcess]
    if device == "cpu":
        kinds += added("cpu_server")
    return kinds[-1]
