"""A server of sums, `2+3` -> `5`, as unreliable as real servers.

    python tests/support/slow_server.py PORT [hang]

It is slow, drops some requests, and stalls once. With `hang` it accepts requests and never answers.
"""

import itertools
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Habits:
    slow_s: float = 0.2
    drops: int = 20  # drops one request in this many
    stalls: int = 7  # the number of the request that takes `stall_s`; 0: none does
    stall_s: float = 60.0
    hangs: bool = False
    requests: itertools.count = field(default_factory=lambda: itertools.count(1))


class Handler(BaseHTTPRequestHandler):
    habits: Habits

    def do_POST(self) -> None:
        number = next(self.habits.requests)
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.habits.hangs:
            threading.Event().wait()
        time.sleep(self.habits.stall_s if number == self.habits.stalls else self.habits.slow_s)
        if number % self.habits.drops == 0:
            return  # closes the connection without writing anything
        reply = added(text).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *words) -> None:
        """Log nothing."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # don't wait for hanging handlers
    request_queue_size = 256

    def handle_error(self, request, client_address) -> None:
        """Log nothing: clients that stopped waiting have closed the connection."""


def added(text: str) -> str:
    try:
        return str(sum(map(int, text.split("+"))))
    except ValueError:
        return "no"


def bound(port: int, habits: Habits) -> Server:
    handler = type("Handler", (Handler,), {"habits": habits})
    return Server(("127.0.0.1", port), handler)


@contextmanager
def running(habits: Habits):
    """Serve in threads on a free port; yield HOST:PORT."""
    with bound(0, habits) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


if __name__ == "__main__":
    port, *hang = sys.argv[1:]
    bound(int(port), Habits(hangs=hang == ["hang"])).serve_forever()
