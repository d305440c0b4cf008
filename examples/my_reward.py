"""Your own reward: --rule examples/my_reward.py, as the only reward (with --model) or together with a judge.

A Sample has its `text` and the final `answer` in it. The function may be async. An error in it ends the run
with a one-line message that names file and line.
"""


def reward(sample):
    """Return 1 for the right answer and 0 otherwise, minus 0.1 for every ten tokens over forty."""
    right = float(sample.answer == sample.answer_key)
    return right - 0.01 * max(0, len(sample.response) - 40)
