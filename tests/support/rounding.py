"""How far float32 may be off, derived from the terms of a sum instead of measured on one machine."""

ROUNDING = 2.0**-24  # one float32 rounding changes a result by at most this fraction: 6e-8


def apart(terms: int) -> float:
    """Return how far apart two sums can be that add the same terms in different orders.

    Each is off by at most one rounding per term, relative to the sum of the terms' absolute values.
    """
    return 2 * terms * ROUNDING
