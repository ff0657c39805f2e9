"""What the named schedules come to where all stages cost the same and transfers are free, as formulas.

Sources: Narayanan et al. 2021 (section 2.2) for GPipe, 1F1B and the interleaved schedule; Lamy-Poirier 2023; Qi et al.
2024 (table 2 and section 6). The simulator needs none of them and is tested against them.
"""

from __future__ import annotations

THERE_AND_BACK = ("zb-v", "dualpipe-v")


def bubble(name: str, stages: int, num_microbatches: int, f: float, b: float, w: float) -> float | None:
    """Makespan - work of a rank, with costs f, b and w of one chunk; None where no formula is known.

    GPipe and 1F1B: for any M. The others: from M = P on, ZB-V from M = 2P - 1 on.
    """
    fill, enough = stages - 1, num_microbatches >= stages
    if name in ("gpipe", "1f1b") or (name in ("interleaved-1f1b", "looped-bfs") and enough):
        return fill * (f + b + w)
    if name in ("zb-h1", "interleaved-zb") and enough and w <= min(f, b):
        return fill * (f + b - w)
    if name == "zb-v" and f == b == w and num_microbatches >= 2 * stages - 1:
        return fill * f
    return None


def busy_share(
    name: str, stages: int, num_microbatches: int, chunks: int, f: float, b: float, w: float, forward_only: bool = False
) -> float | None:
    """Work of all ranks / (P * makespan); M / (M + P - 1) for forwards alone, GPipe and 1F1B. None where unknown."""
    if forward_only:
        enough = chunks == 1 or num_microbatches >= stages
        idle = (stages - 1) * f * (2 if name in THERE_AND_BACK else 1) if enough else None
        work = chunks * num_microbatches * f
    else:
        idle = bubble(name, stages, num_microbatches, f, b, w)
        work = chunks * num_microbatches * (f + b + w)
    if idle is None or work + idle == 0:
        return None
    return work / (work + idle)


def peak_in_flight(name: str, stages: int, num_microbatches: int, chunks: int, rank: int) -> int | None:
    """The most chunk activations that a rank holds at once; None where no formula is known for these sizes."""
    p, m, v = stages, num_microbatches, chunks
    enough = m >= 2 * p
    formulas = {
        "gpipe": m,
        "1f1b": min(m, p - rank),
        "interleaved-1f1b": (v - 1) * p + 2 * (p - 1 - rank) + 1 if enough and m % p == 0 else None,
        "looped-bfs": m * v,
        "zb-h1": min(m, p),
        "zb-h2": min(m, 2 * p - 1),
        "interleaved-zb": v * p if enough and m % p == 0 else None,
        "zb-v": 2 * p if enough else None,
        "dualpipe-v": 2 * p + 1 if enough else None,
    }
    return formulas[name]
