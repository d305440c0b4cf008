"""run.py, which also records every answer that each rank trains on, in OUT/trained.RANK.jsonl."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import controller
import run
from sample import flat

FIELDS = ("prompt_id", "index", "prompt", "response", "logprobs", "reward")


def main(words: list[str]) -> None:
    gather_metrics = controller.gather_metrics

    async def recorded(c, stats, shares):
        rows = []
        for sample in flat(shares.of(c.devices.actor)):
            row = {name: vars(sample)[name] for name in FIELDS}
            rows.append(json.dumps({"step": c.state.step} | row) + "\n")
        with Path(c.config.out, f"trained.{c.world.rank}.jsonl").open("a") as file:
            file.writelines(rows)
        return await gather_metrics(c, stats, shares)

    controller.gather_metrics = recorded
    run.main(words)


if __name__ == "__main__":
    main(sys.argv[1:])
