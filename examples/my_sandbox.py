"""An environment that asks a server over HTTP, for example a sandbox that runs what the policy writes.

SANDBOX names the server, and SANDBOX_TIMEOUT_S is how long it may take. A turn that ends with ? is sent
to it, and what it returns is the reply. `step` may block: it has a thread of its own. ConnectionError and
TimeoutError may pass through: the episode is dropped and counted, and isn't worth 0. http.client raises
them; urllib.request and other libraries have classes of their own.
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
    """Send the server a text, and return its own. ConnectionError or TimeoutError."""
    with closing(HTTPConnection(SERVER, timeout=TIMEOUT_S)) as connection:
        try:
            connection.request("POST", "/", text.encode())
            response = connection.getresponse()
            reply = response.read().decode()
        except HTTPException as error:  # half an answer, or none
            raise ConnectionError(f"{SERVER}: {error}") from None
    if response.status != 200:
        raise ConnectionError(f"{SERVER}: status {response.status}: {reply}")
    return reply
