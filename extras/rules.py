"""User rules: rewards and costs from functions in users' files, --rule FILE.py and --cost-rule FILE.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from genrm import Judgement
from runtime.hooks import needed
from sample import TextSample

if TYPE_CHECKING:
    from extras.worker import UserCode


@dataclass(frozen=True)
class UserRule:
    """A function in a user's file, `reward(sample)`, which may be `async`."""

    code: UserCode

    async def judge(self, sample: TextSample) -> Judgement | None:
        """Call the function on a copy of the sample. Returns None if the function does.

        Raises UserError if it fails, is late, or returns anything else but a finite number.
        """
        title = self.code.title
        how = dict(what=f"{title} on the prompt {sample.question[:60]!r}", images=sample.media)
        # images are read only if the function reads them
        media = tuple((image.digest, image.shape, image.token) for image in sample.media)
        value = await self.code.call("rule", replace(sample, media=media), **how)
        return None if value is None else Judgement(f"{title}: {value}", value)


def load_file(title: str, spec: str, name: str, timeout_s: float) -> UserRule:
    """Run a file; return its function `my.py:other`, or `name`. Raises UserError if there is none."""
    specs = "FILE.py, FILE.py:name, right, number, length:40 or forbidden:7"
    load = needed("user_code", title)
    return UserRule(load(title, spec, name, "function {}(sample)", specs, timeout_s))
