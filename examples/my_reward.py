"""A reward of your own: --rule examples/my_reward.py, alone (with --model) or beside a judge.

A Sample comes with its `text` and the final `answer` in it. The function may be async. An error in it ends
the run in one line with file and line.
"""


def reward(sample):
    """1 for the right answer, a tenth less for every ten tokens over forty."""
    right = float(sample.answer == sample.answer_key)
    return right - 0.01 * max(0, len(sample.response) - 40)
