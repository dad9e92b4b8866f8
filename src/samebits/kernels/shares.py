"""How a launch for several tensors shares out its blocks."""

from __future__ import annotations

from collections.abc import Sequence


def share_out(places: int, works: Sequence[float], own: Sequence[int], most: Sequence[int]) -> list[int]:
    """``own`` and so many more places, each for the one that has most work for each of its places.

    Args:
        own: places that each has, one at least.
        most: that each can use.
    """
    shares = list(own)
    for _ in range(places):
        usable = [i for i, share in enumerate(shares) if share < most[i]]
        if not usable:
            break
        shares[max(usable, key=lambda i: works[i] / shares[i])] += 1
    return shares
