"""An engine's process: SGLang's own server, patched first for what this device lacks.

    python -m engines.server_main --model-path DIR ...    (in the repository's root; SGLang's own flags)

or `main` in a process that has imported SGLang. With CUDA, only seeded sampling is patched and batches aren't
logged. The server dies with the process that started it.
"""

import logging
import multiprocessing
import os
import secrets
import signal
import sys
from multiprocessing import resource_tracker
from pkgutil import resolve_name

import torch

from cpu import invariance, sglang
from runtime.parent import die_with_owner

# these log each batch, sleep and bucket of a push; the first one also all settings, with the key
CHATTY = ("sglang.srt.entrypoints.engine", "sglang.srt.managers")


def share_group():
    """Use one process group: SGLang's dozen would each have a thread that wakes 100 times a second."""
    torch.distributed.new_group = lambda *args, **kwargs: torch.distributed.group.WORLD


def run_scheduler_process(server_args, *args, **kwargs):
    """Run SGLang's child process that owns the model, with this device's patches."""
    from sglang.srt.managers import scheduler

    if not torch.cuda.is_available() or "--enable-deterministic-inference" in sys.argv:
        invariance.repair_sampling()
    if not torch.cuda.is_available():
        invariance.install()
        sglang.replace_lscpu()
        share_group()
    scheduler.run_scheduler_process(server_args, *args, **kwargs)


def fork_children():
    """Make SGLang fork its processes, before any thread runs: a spawned one would import torch and SGLang."""
    set_start_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force: set_start_method("fork", force)
    os.register_at_fork(after_in_child=die_with_owner)


class KeyGuard:
    """Refuses requests without the key.

    SGLang checks no websocket, leaves some paths open, and takes the path from a URL into which an older
    Starlette puts the Host header.
    """

    def __init__(self, app, key):
        self._app = app
        self._header = f"Bearer {key}".encode()

    async def __call__(self, scope, receive, send):
        shown = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or secrets.compare_digest(shown, self._header):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body"})


def main():
    key = os.environ.pop("NANOYATT_API_KEY", "")  # not on the command line, where `ps` shows it
    sys.argv.append(f"--api-key={key}")
    from sglang.srt import server_args
    from sglang.srt.entrypoints import http_server
    from sglang.srt.multimodal.processors import base_processor
    from sglang.srt.utils import kill_process_tree

    http_server.app.add_middleware(KeyGuard, key=key)
    # a GPU decodes a JPEG to different pixels
    base_processor.BaseMultimodalProcessor.gpu_image_decode = False
    if not torch.cuda.is_available():
        fork_children()
        server_args.add_deterministic_attention_backend_choices(["torch_native"])
        server_args.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    settings = server_args.prepare_server_args(sys.argv[1:])
    for name in os.environ.get("NANOYATT_PATCHES", "").split():
        resolve_name(name)(settings)
    try:
        http_server.launch_server(settings, run_scheduler_process_func=run_scheduler_process)
    finally:  # as in SGLang's own main: if the port is taken, this process would wait for its children
        kill_process_tree(os.getpid(), include_parent=False)


# With CUDA, SGLang spawns its children, which import this file as __mp_main__ before SGLang.
if __name__ in ("__main__", "__mp_main__"):
    # SGLang imports the code that a model's auto_map names, trusted or not, but only from this folder
    os.environ["HF_MODULES_CACHE"] = os.devnull
    die_with_owner()
    # a server starts with signals blocked; multiprocessing unblocks some when it starts its tracker
    deaf = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, deaf)
    if torch.cuda.is_available():
        for chatty in CHATTY:
            logging.getLogger(chatty).setLevel(logging.WARNING)
    else:
        library = sglang.install()
if __name__ == "__main__":
    main()
