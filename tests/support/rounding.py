"""How far float32 may be off, from the terms that a sum adds: no figure of one machine's sums."""

ROUNDING = 2.0**-24  # one rounding of a float32, at most, as a part of its result: 6e-8


def apart(terms: int) -> float:
    """How far two sums that add the same terms in other orders can be apart.

    Each is off by at most one rounding a term, as a part of the sum of the terms' absolute values.
    """
    return 2 * terms * ROUNDING
