"""An environment that asks a server over HTTP, for example a sandbox that runs the policy's code.

SANDBOX is the server's address, and SANDBOX_TIMEOUT_S its time limit. A turn that ends with ? is sent to the
server, and the server's response is the reply. `step` may block because it runs in its own thread. Let
ConnectionError and TimeoutError through: the episode is then dropped and counted instead of scored 0.
http.client raises these two; convert the exceptions of urllib.request and other libraries.
"""

import os
from contextlib import closing
from http.client import HTTPConnection, HTTPException

SERVER = os.environ.get("SANDBOX", "127.0.0.1:8000")
TIMEOUT_S = float(os.environ.get("SANDBOX_TIMEOUT_S", "10"))


class Environment:
    def __init__(self, sample, *, seed):
        self.right = f">{sample.answer_key}"

    def step(self, text):
        return ask(text[:-1]) if text.endswith("?") else float(text == self.right)


def ask(text):
    """Send the server a text and return its reply. Raises ConnectionError or TimeoutError."""
    with closing(HTTPConnection(SERVER, timeout=TIMEOUT_S)) as connection:
        try:
            connection.request("POST", "/", text.encode())
            response = connection.getresponse()
            reply = response.read().decode()
        except HTTPException as error:  # an incomplete reply, or none
            raise ConnectionError(f"{SERVER}: {error}") from None
    if response.status != 200:
        raise ConnectionError(f"{SERVER}: status {response.status}: {reply}")
    return reply
