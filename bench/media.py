"""What images cost the controllers: real ranks, real engines, an image of 1 MB for each prompt.

    python bench/media.py                  2 and 4 ranks: without images, with them, with a central controller

Every run trains two steps on 16 prompts of 4 answers a rank, which a rule judges; the model is the image
demo's, before its warm start. A micro-batch has 512 tokens: while it is trained on, the trainer holds its
images as floats, and what the tower makes of them. `central` is for comparison only: rank 0 receives all
samples with their images, and deals them. Of the busiest rank:
    between   MB a step of samples that go from rank to rank
    request   MB of the largest request to an engine, for a whole group
    peak      MB of resident memory above the same run's without images: of the process of the controller and
              the trainer, not of its engine's
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import launch
import meter
import numpy as np
from tables import print_table

import controller
import run
from engines import wire
from examples.make_demo import models
from runtime.world import World
from sample import Sample

SIDES = ("text", "images", "central")
PROMPTS, ANSWERS, STEPS = 16, 4, 2  # of a rank
PIXELS = (584, 600, 3)  # of noise: a PNG of 1.05 MB
FOLDER = launch.ROOT / "runs" / "bench" / "media"
exchange_in_parallel = controller.exchange


async def exchange_through_one(
    samples: list[Sample], c: controller.Controller
) -> controller.MiniBatches:
    """In the place of controller.exchange: all samples and their images to rank 0, which deals them."""
    c.prompts.attach_images(samples)
    images = {image for sample in samples for image in sample.media}
    held = {image: replace(image, read=partial(bytes, image.read())) for image in images}
    for sample in samples:
        sample.media = tuple(held[image] for image in sample.media)
    senders = range(c.world.size) if c.world.rank == 0 else ()
    parcels = await c.world.exchange({0: samples}, senders)
    return await exchange_in_parallel(
        [sample for parcel in parcels.values() for sample in parcel], c
    )


def one_rank(side: str, arguments: list[str]) -> None:
    """A rank of the run itself, which counts what leaves it."""
    sent, exchange, in_pieces = {"between": 0, "request": 0}, World.exchange, wire.in_pieces

    def counted(world: World, outgoing: dict[int, Any], senders: Any):
        leaving = [pickle.dumps(parcel) for rank, parcel in outgoing.items() if rank != world.rank]
        sent["between"] += sum(map(len, leaving))
        return exchange(world, outgoing, senders)

    async def counted_pieces(body: dict) -> AsyncIterator[bytes]:
        size = 0
        async for piece in in_pieces(body):
            size += len(piece) if "sampling_params" in body else 0  # no push of weights
            yield piece
        sent["request"] = max(sent["request"], size)

    World.exchange, wire.in_pieces = counted, counted_pieces
    if side == "central":
        controller.exchange = exchange_through_one
    rank = os.environ["RANK"]
    end = controller.finish

    async def finish(c: controller.Controller) -> int:
        facts = sent | {"peak": meter.peak_rss_mb(os.getpid())}
        Path(c.config.out, f"media{rank}.json").write_text(json.dumps(facts))
        return await end(c)

    controller.finish = finish
    run.main(arguments)


def make_inputs(rows: int) -> None:
    """A model, rows with and without images, a rule that finds every group informative."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    models.new_model(FOLDER / "model", 0, models.vision_model)
    (FOLDER / "rule.py").write_text("def reward(sample):\n    return float(sample.index % 2)\n")
    rng = np.random.default_rng(0)
    from PIL import Image

    for number in range(rows):
        Image.fromarray(rng.integers(0, 256, PIXELS, dtype=np.uint8)).save(FOLDER / f"{number}.png")
    files = [f"{number}.png" for number in range(rows)]
    for side, row in {"text": lambda f: {"prompt": "7+5="}, "images": row_of}.items():
        text = "".join(json.dumps(row(file)) + "\n" for file in files)
        (FOLDER / f"{side}.jsonl").write_text(text)


def row_of(file: str) -> dict:
    return {"prompt": "<image>=", "images": [file]}


def measure(side: str, ranks: int) -> dict[str, float]:
    """A run; of its busiest rank, in bytes and MB."""
    out = FOLDER / f"{side}-{ranks}"
    rows = FOLDER / ("text.jsonl" if side == "text" else "images.jsonl")
    settings = dict(
        model=FOLDER / "model", data=rows, rule=FOLDER / "rule.py", out=out, steps=STEPS, lr=1e-9
    )
    settings |= {
        "prompts-per-step": PROMPTS * ranks,
        "answers-per-prompt": ANSWERS,
        "max-new-tokens": 16,
    }
    settings |= {"max-model-len": 256, "mode": "full", "save-every": 0, "device": "cpu"}
    settings["max-tokens-per-micro-batch"] = 512
    given = [str(part) for name, value in settings.items() for part in (f"--{name}", value)]
    script = [Path(__file__), "--rank", side, *given]
    launch.run_to_its_end(
        [launch.TORCHRUN, "--nproc-per-node", ranks, *script], out.with_suffix(".log")
    )
    found = [json.loads(path.read_text()) for path in out.glob("media*.json")]
    return {name: max(facts[name] for facts in found) for name in found[0]}


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    launch.end_with_us()
    make_inputs(max(given.ranks) * PROMPTS * STEPS)
    found = {(ranks, side): [] for ranks in given.ranks for side in SIDES}
    for _ in range(given.repeats):  # in turns
        for (ranks, side), facts in found.items():
            facts.append(measure(side, ranks))
    rows = []
    for (ranks, side), facts in found.items():
        middle = {name: median(each[name] for each in facts) for name in facts[0]}
        peaks = [
            each["peak"] - bare["peak"]
            for each, bare in zip(facts, found[ranks, "text"], strict=True)
        ]
        between, request = middle["between"] / STEPS / 1e6, middle["request"] / 1e6
        shown = f"{median(peaks):.0f} ({min(peaks):.0f} to {max(peaks):.0f})"
        rows.append([str(ranks), side, f"{between:.2f}", f"{request:.3f}", shown])
    print_table(["ranks", "side", "between, MB", "request, MB", "peak, MB"], rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        one_rank(sys.argv[2], sys.argv[3:])
    else:
        main()
