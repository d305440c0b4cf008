"""Items that the first rank of a machine makes, and all its ranks read: they share the memory of a file."""

import os
import pickle
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.atomic_files import writing
from runtime.rendezvous import private_folder

CHUNK = 1 << 24  # bytes that are written at once, or a larger item


def once_a_machine(name: str, items: Iterator) -> Sequence:
    """Return items that only the machine's first rank makes; the others wait for its file, however long.

    Not collective. The first rank raises what making an item raises, or RunLost if the disk is full.
    """
    import pyarrow

    path = private_folder() / name
    schema = pyarrow.schema({"pickles": pyarrow.large_binary()})  # binary() ends at 2 GB
    # without torchrun the folder is this rank's own
    if os.environ.get("LOCAL_RANK") == "0" or "TORCHELASTIC_RUN_ID" not in os.environ:
        with writing(path.with_suffix(".part")) as part:
            with pyarrow.OSFile(str(part), "wb") as file, pyarrow.ipc.new_file(file, schema) as out:
                for chunk in pickled(items):
                    out.write_batch(pyarrow.record_batch([chunk], schema))
            part.rename(path)
    while not path.exists():
        time.sleep(0.05)
    return Mapped(pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all()["pickles"])


def pickled(items: Iterator) -> Iterator[list[bytes]]:
    """Yield the items' pickles in chunks."""
    chunk, size = [], 0
    for item in items:
        chunk.append(pickle.dumps(item))
        size += len(chunk[-1])
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    yield chunk


@dataclass(eq=False)
class Mapped(Sequence):
    """Items of a memory-mapped file, each unpickled when it is accessed."""

    pickles: Any  # an Arrow column

    def __len__(self) -> int:
        return len(self.pickles)

    def __getitem__(self, number: int) -> Any:
        return pickle.loads(self.pickles[number].as_buffer())
