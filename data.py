"""Prompts, and the cursor with which all controllers draw them."""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Protocol

from sample import Prompt, Sample

Group = list[Sample]  # the answers to one prompt
READERS = 4  # threads that read prompts, because a 1080p clip takes seconds


class Source(Protocol):
    """A source of prompts: an endless supply for `training`, and held-out ones."""

    held_out: Sequence[Prompt]

    def training(self, prompt_id: int) -> Prompt: ...


@dataclass(eq=False)
class Prompts:
    """A cursor over a source and its carried prompts. It is equal on all ranks, except for `groups`."""

    source: Source
    answers: int  # answers per group
    keeps_groups: bool = False  # whether carried prompts keep their answers so far
    has_greedy: bool = False  # whether each group has one more answer, a greedy one
    has_images: bool = False
    threads: Executor | None = None  # read prompts with images or clips
    cursor: int = 0  # the first prompt_id that was never drawn
    carried: list[int] = field(default_factory=list)  # drawn, but not used
    groups: dict[int, Group] = field(default_factory=dict)  # this rank's groups of carried prompts
    owners: dict[int, int] = field(default_factory=dict)  # drawn prompt -> its controller
    _reading: dict[int, asyncio.Task[Prompt]] = field(default_factory=dict, init=False)

    def draw(self, count: int) -> list[int]:
        """Return the next prompt_ids: carried ones first, then new ones."""
        again = self.carried[:count]
        del self.carried[:count]
        fresh = range(self.cursor, self.cursor + count - len(again))
        self.cursor = fresh.stop
        return again + list(fresh)

    def assign_owners(self, prompt_ids: list[int], controllers: int) -> dict[int, int]:
        """Map prompt_ids to controllers: to the group's owner, or to the one with the fewest prompts."""
        owners = {i: self.owners[i] for i in prompt_ids if i in self.owners}
        counts = dict.fromkeys(range(controllers), 0) | Counter(self.owners.values())
        heap = sorted((count, rank) for rank, count in counts.items())
        for prompt_id in prompt_ids:
            if prompt_id not in owners:
                count, rank = heap[0]
                owners[prompt_id] = rank
                heapq.heapreplace(heap, (count + 1, rank))
        self.owners |= owners
        return owners

    async def read(self, prompt_ids: Collection[int]) -> dict[int, Prompt]:
        """Read training prompts, with threads several at once. Raises UserError if one can't be used."""
        if self.threads is None:
            return {prompt_id: self.source.training(prompt_id) for prompt_id in prompt_ids}
        self._start_reading(prompt_ids)
        return {prompt_id: await self._reading.pop(prompt_id) for prompt_id in prompt_ids}

    def read_ahead(self, count: int, controllers: int, rank: int) -> None:
        """Start reading those of the next `count` prompts that this controller will probably own."""
        if self.threads is None:
            return
        preview = replace(self, carried=list(self.carried), owners=dict(self.owners))
        owners = preview.assign_owners(preview.draw(count), controllers)
        own = [prompt_id for prompt_id, owner in owners.items() if owner == rank]
        for prompt_id in self._reading.keys() - own:
            self._reading.pop(prompt_id).cancel()
        self._start_reading(own)

    def _start_reading(self, prompt_ids: Collection[int]) -> None:
        """Start a task for each of these prompts that has none."""
        for prompt_id in prompt_ids:
            if prompt_id not in self._reading:
                read = self.in_thread(self.source.training, prompt_id)
                self._reading[prompt_id] = asyncio.create_task(read)

    async def in_thread(self, read: Callable[[int], Prompt], number: int) -> Prompt:
        """Call `read` in a thread, because a clip would block the event loop for seconds."""
        if self.threads is None:
            return read(number)
        return await asyncio.get_running_loop().run_in_executor(self.threads, read, number)

    def group(self, prompt_id: int, prompt: Prompt) -> Group:
        """Return a prompt's group: the answers so far, or empty samples."""
        fields = (prompt.tokens, prompt.question, prompt.answer_key, prompt.images, prompt.turns)
        indices = range(self.answers + self.has_greedy)
        empty = [Sample(prompt_id, i, *fields, greedy=i == self.answers) for i in indices]
        group = self.groups.pop(prompt_id, empty)
        for sample in group:
            sample.media = prompt.images
            sample.row = prompt.row
        return group

    async def attach_images(self, samples: list[Sample]) -> None:
        """Read the images of samples from other ranks. Images are never sent: all machines have the files."""
        if self.has_images:
            prompts = await self.read({sample.prompt_id for sample in samples})
            for sample in samples:
                sample.media = prompts[sample.prompt_id].images

    def carry_over(self, prompt_ids: list[int], groups: list[Group]) -> None:
        """Put unused prompts first in the next step. groups: this controller's groups of them."""
        self.carried[:0] = prompt_ids
        kept = self.carried if self.keeps_groups else []
        self.owners = {i: self.owners[i] for i in kept if i in self.owners}
        if self.keeps_groups:
            self.groups |= {group[0].prompt_id: group for group in groups}

    def state(self) -> dict:
        """Return what a checkpoint keeps besides `groups`. Owners are pairs: JSON has no integer keys."""
        owners = list(self.owners.items())
        return {"cursor": self.cursor, "carried": list(self.carried), "owners": owners}

    def load_state(self, state: dict, groups: list[Group], controllers: int, rank: int) -> None:
        """Continue from a `state`. groups: all controllers'. rank: among those that serve, or -1."""
        self.cursor = state["cursor"]
        self.carried = list(state["carried"])
        if self.keeps_groups:
            self.owners = {prompt_id: owner % controllers for prompt_id, owner in state["owners"]}
        own = [group for group in groups if self.owners.get(group[0].prompt_id) == rank]
        self.groups = {group[0].prompt_id: group for group in own}
