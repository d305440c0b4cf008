"""A rule that reads the columns of its rows, beside another rule.

torchrun --nproc-per-node 2 run.py --model demo/models/written/actor --data examples/my_rows.jsonl \
    --judge-format addition --rule right examples/my_rule_rows.py:tidy \
    --max-new-tokens 72 --max-model-len 256 --lr 5e-4 --prompts-per-step 16
"""


def tidy(sample):
    """1 for an answer that ends by itself in as many digits as its row says; sums alone are this rule's."""
    if sample.row["kind"] != "sum":
        return None  # the reward is that of `right` alone
    has_ended = sample.text.endswith("<eos>")  # `text` has the special tokens, `plain_text` hasn't
    return float(has_ended and len(sample.answer or "") == sample.row["digits"])
