"""Users' code in the test's own process, where it may wait on the virtual clock, and tests can look at it."""

import inspect
import pickle

from extras.users import CALLS, UserCode, Users


class InProcess:
    """A function or class instead of a file's. Calls get copies, as from the worker."""

    limit_s = 0.0

    def __init__(self, title, found, file="g.py"):
        self.title = title
        self.names = dir(found)
        self.users = Users(read_image=None)
        self.users.codes[title] = UserCode(title, file, found)

    async def call(self, verb, *given, **_):
        call = CALLS[verb](self.users, self.title, *pickle.loads(pickle.dumps(given)))
        found = call.make()
        with call.code:
            return call.read(await found if inspect.isawaitable(found) else found)
