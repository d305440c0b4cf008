"""An environment that asks a server over HTTP, for example a sandbox that runs the policy's code.

SANDBOX is the server's address, and SANDBOX_TIMEOUT_S its time limit. A turn that ends with ? is sent to the
server, and the server's response is the reply. `step` may block because it runs in its own thread. Don't
catch what http.client or another library raises: the episode is then dropped and counted, not scored 0.
"""

import os
from contextlib import closing
from http.client import HTTPConnection

SERVER = os.environ.get("SANDBOX", "127.0.0.1:8000")
TIMEOUT_S = float(os.environ.get("SANDBOX_TIMEOUT_S", "10"))


class Environment:
    def __init__(self, sample, *, seed):
        self.right = f">{sample.answer_key}"

    def step(self, text):
        return ask(text[:-1]) if text.endswith("?") else float(text == self.right)


def ask(text):
    """Send the server a text and return its reply. Raises ConnectionError, TimeoutError, HTTPException."""
    with closing(HTTPConnection(SERVER, timeout=TIMEOUT_S)) as connection:
        connection.request("POST", "/", text.encode())
        response = connection.getresponse()
        reply = response.read().decode()
    if response.status != 200:
        raise ConnectionError(f"{SERVER}: status {response.status}: {reply}")
    return reply
