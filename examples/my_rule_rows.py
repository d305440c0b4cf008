"""A rule that reads the columns of its rows and runs together with another rule.

torchrun --nproc-per-node 2 run.py --model demo/models/written/actor --data examples/my_rows.jsonl \
    --judge-format addition --rule right examples/my_rule_rows.py:tidy \
    --max-new-tokens 72 --max-model-len 256 --lr 5e-4 --prompts-per-step 16
"""


def tidy(sample):
    """Return 1 for a finished answer with as many digits as its row specifies. Applies only to sums."""
    if sample.row["kind"] != "sum":
        return None  # only `right` gives a reward
    has_ended = sample.text.endswith("<eos>")  # `text` has the special tokens, `plain_text` doesn't
    return float(has_ended and len(sample.answer or "") == sample.row["digits"])
