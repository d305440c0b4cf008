"""Runs examples/one_file.py and records every judged answer:

    python -m tests.workers.one_file RECORD SEED STEPS PROMPTS

RECORD gets a line for each step, and one with the final accuracy.
"""

import json
import sys
from pathlib import Path

from tests import ROOT

FILE = ROOT / "examples" / "one_file.py"
LOOP = "\noptimizer = "  # all before it only defines things


def main(record: str, seed: str, steps: str, prompts: str) -> None:
    definitions, loop = FILE.read_text().split(LOOP)
    space = {"__file__": str(FILE)}
    exec(definitions, space)
    generate, judged = space["generate"], space["judged"]
    answers, waves = [], []

    def noted_generate(*given):
        waves.append(generate(*given))
        return waves[-1]

    def noted_judged(questions, texts):
        tokens, written, logprobs, _ = waves[-1]  # the policy's
        rewards, critiques = judged(questions, texts)
        for row, (_, prompt_id, index) in enumerate(space["names"]):
            response = tokens[row][written[row]]
            answers.append(
                {
                    "prompt_id": prompt_id,
                    "index": index,
                    "text": space["tokenizer"].decode(response, skip_special_tokens=True),
                    "response": response.tolist(),
                    "logprobs": logprobs[row][written[row]].tolist(),
                    "reward": rewards[row].item(),
                    "critique": critiques[row],
                }
            )
        return rewards, critiques

    with Path(record).open("w") as file:

        def note(line):
            found = {"line": line, "answers": answers, "loss": space["loss"].item()}
            file.write(json.dumps(found | {"accuracy": float(space.get("accuracy", 0))}) + "\n")
            answers.clear()

        settings = {"SEED": int(seed), "STEPS": int(steps), "PROMPTS": int(prompts)}
        space |= {"generate": noted_generate, "judged": noted_judged, "print": note} | settings
        exec(LOOP + loop, space)


if __name__ == "__main__":
    main(*sys.argv[1:])
