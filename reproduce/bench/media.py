"""The cost of images and clips to the controllers: real ranks, real engines, one file per prompt.

    python reproduce/bench/media.py    images of 1 MB; 2 and 4 ranks: without, with, with a central controller
    python reproduce/bench/media.py --videos     clips of 10 MB

Every run trains for two steps with 16 prompts per rank and 4 answers per prompt, scored by a rule. The model
is the image demo's before its warm start. A micro-batch has 512 tokens; during its update the trainer holds
its images as floats and the vision tower's activations. `central` is for comparison only: rank 0 receives all
samples with their files and deals them out. The table shows the busiest rank's
    between   MB per step of samples that go from rank to rank
    peak      MB of resident memory above the same run without files, in the process of the controller and
              the trainer (not the engine's)
"""

import json
import os
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

import build
import controller
import run
from examples.make_demo import models
from inputs.templates import IMAGE, VIDEO
from reproduce.bench.measuring import ROOT, column, parser_of, peak_rss_mb, print_table, run_ranks
from runtime.world import World
from scheduling.dealing import Sizes
from state import Controller, RolloutBatch

SIDES = ("text", "media", "central")
PROMPTS = 16  # per rank and step
ANSWERS = 4
STEPS = 2
PIXELS = (584, 600, 3)  # noise: a PNG has 1.05 MB, a clip 10
FRAMES = 16  # a clip's, in 4 s
FOLDER = ROOT / "runs" / "bench" / "media"
RULE = "def reward(sample):\n    return float(sample.index % 2)\n"  # every group is informative

# the original functions, which a rank wraps to count
exchange_in_parallel = controller.exchange
exchange_parcels = World.exchange
train = controller.train
sent = {"between": 0}  # bytes of samples that this rank sent to others


async def exchange_through_one(
    batch: RolloutBatch, held: list[Sizes], c: Controller
) -> controller.Shares:
    """Replace controller.exchange: send all samples and their files to rank 0, which deals them out."""
    samples = batch.kept
    prompts = await c.prompts.read({sample.prompt_id for sample in samples})
    files = {}
    for prompt_id, prompt in prompts.items():
        names = prompt.row.get("images", []) + prompt.row.get("videos", [])
        files[prompt_id] = [Path(FOLDER, name).read_bytes() for name in names]
    for sample in samples:
        sample.row = {"files": files[sample.prompt_id]}  # a group's answers share them
    parcels = await c.world.exchange({0: samples})
    received = [sample for parcel in parcels.values() for sample in parcel]
    here = Sizes.of(received, c.devices.actor.prefix_of, has_costs=False)
    there = Sizes.of([], c.devices.actor.prefix_of, has_costs=False)
    held = [here if rank == 0 else there for rank in range(c.world.size)]
    held = await c.world.broadcast(held)
    return await exchange_in_parallel(replace(batch, kept=received), held, c)


def counted_exchange(world: World, outgoing: dict[int, Any]):
    """Run World.exchange and count the bytes that this rank sends to others."""
    for rank, parcel in outgoing.items():
        if rank != world.rank:
            sent["between"] += len(pickle.dumps(parcel))
    return exchange_parcels(world, outgoing)


async def train_and_count(c: controller.Controller) -> bool:
    """Run controller.train, then write the counts to a file."""
    was_stopped = await train(c)
    facts = sent | {"peak": peak_rss_mb(os.getpid())}
    Path(c.config.out, f"media{c.world.rank}.json").write_text(json.dumps(facts))
    return was_stopped


def one_rank(side: str, arguments: list[str]) -> None:
    """Run one rank of the run."""
    World.exchange = counted_exchange
    build.TRAINING = build.TRAINING._replace(run=train_and_count)
    if side == "central":
        controller.exchange = exchange_through_one
    run.main(arguments)


def make_inputs(rows: int, column: str) -> None:
    """Write a model, a rule, and rows with and without files in the column `column`."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    models.new_model(FOLDER / "model", 0, models.vision_model)
    (FOLDER / "rule.py").write_text(RULE)
    rng = np.random.default_rng(0)
    with (FOLDER / "text.jsonl").open("w") as text, (FOLDER / "media.jsonl").open("w") as media:
        for number in range(rows):
            name, place = WRITERS[column](number, rng)
            text.write(json.dumps({"prompt": "7+5="}) + "\n")
            media.write(json.dumps({"prompt": f"{place}=", column: [name]}) + "\n")


def write_image(number: int, rng: np.random.Generator) -> tuple[str, str]:
    from PIL import Image

    Image.fromarray(rng.integers(0, 256, PIXELS, dtype=np.uint8)).save(FOLDER / f"{number}.png")
    return f"{number}.png", IMAGE


def write_clip(number: int, rng: np.random.Generator) -> tuple[str, str]:
    """Write H.264 that keeps nearly all of the noise."""
    import av

    with av.open(FOLDER / f"{number}.mp4", "w") as output:
        stream = output.add_stream("libx264", rate=4, options={"qp": "4", "preset": "ultrafast"})
        stream.height, stream.width, _ = PIXELS
        stream.pix_fmt = "yuv420p"
        for _ in range(FRAMES):
            noise = rng.integers(0, 256, PIXELS, dtype=np.uint8)
            output.mux(stream.encode(av.VideoFrame.from_ndarray(noise, format="rgb24")))
        output.mux(stream.encode())
    return f"{number}.mp4", VIDEO


# column -> the function that writes a file and returns its name and placeholder
WRITERS = {"images": write_image, "videos": write_clip}


def measure(side: str, ranks: int) -> dict[str, float]:
    """Run a side; return its busiest rank's counts, in bytes and MB."""
    out = FOLDER / f"{side}-{ranks}"
    rows = FOLDER / ("text.jsonl" if side == "text" else "media.jsonl")
    words = [__file__, "--rank", side]
    words += ["--model", FOLDER / "model", "--data", rows, "--rule", FOLDER / "rule.py"]
    words += ["--out", out, "--steps", STEPS, "--lr", 1e-9, "--mode", "full"]
    words += ["--prompts-per-step", PROMPTS * ranks, "--answers-per-prompt", ANSWERS]
    words += ["--max-new-tokens", 16, "--max-model-len", 256, "--save-every", 0]
    words += ["--device", "cpu", "--max-tokens-per-micro-batch", 512]
    run_ranks(ranks, words, out.with_suffix(".log"))
    found = [json.loads(path.read_text()) for path in out.glob("media*.json")]
    return {name: max(column(found, name)) for name in found[0]}


def table_row(side: str, ranks: int, runs: list[dict], bare: list[dict]) -> list[str]:
    """Return a side's medians as a table row. bare: the runs without files, in the same order."""
    between = median(column(runs, "between")) / STEPS / 1e6
    pairs = zip(column(runs, "peak"), column(bare, "peak"), strict=True)
    peaks = [peak - without for peak, without in pairs]
    peak = f"{median(peaks):.0f} ({min(peaks):.0f} to {max(peaks):.0f})"
    return [str(ranks), side, f"{between:.2f}", peak]


def main() -> None:
    parser = parser_of(__doc__, repeats=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--videos", action="store_true")
    given = parser.parse_args()
    make_inputs(max(given.ranks) * PROMPTS * STEPS, "videos" if given.videos else "images")
    found = {(ranks, side): [] for ranks in given.ranks for side in SIDES}
    for _ in range(given.repeats):  # sides alternate
        for (ranks, side), runs in found.items():
            runs.append(measure(side, ranks))
    rows = []
    for (ranks, side), runs in found.items():
        rows.append(table_row(side, ranks, runs, found[ranks, "text"]))
    print_table(["ranks", "side", "between, MB", "peak, MB"], rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        one_rank(sys.argv[2], sys.argv[3:])
    else:
        main()
