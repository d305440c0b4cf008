"""Your own judge, which gives 0 to 10 points; the reward is a tenth of the points.

torchrun --nproc-per-node 2 examples/my_judge.py --model DIR --judge DIR --data FILE --judge-format points
"""

import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import genrm
import run

GRADER = """\
You are a strict grader. First say in a few sentences what is good and what is bad in the response.
Then write one last line: Points: and a number from 0 (useless) to 10 (complete and correct).

Request:
{question}

Response:
{answer}"""


def tenth_of_points(text):  # None if the critique can't be parsed; then the answer is dropped
    points = re.findall(r"points:[\s*]*(\d+(?:\.\d+)?)", text, re.IGNORECASE)
    return float(points[-1]) / 10 if points and float(points[-1]) <= 10 else None


shown = partial(genrm.chat_prompt, instruction=GRADER)  # the judge sees the whole response
graded = replace(genrm.FORMATS["chat"], prompt=shown, parse=tenth_of_points, full_response=True)
genrm.FORMATS["points"] = graded
if __name__ == "__main__":
    run.main(sys.argv[1:])
