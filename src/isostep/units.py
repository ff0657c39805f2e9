"""Example ids, their 64-bit mix, and the coverage that proves which examples an update really used.

Coverage is a sum of mixed ids modulo 2**64 and a count. The sum does not depend on order, so replicas add
theirs up; a lost, repeated or foreign example changes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

MASK64 = (1 << 64) - 1


def mix64(value: int) -> int:
    """Finalizer of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators")."""
    value = (value + 0x9E3779B97F4A7C15) & MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def mix64_array(values: np.ndarray) -> np.ndarray:
    """`mix64` of each element. values: uint64, one dimension or more; returns its like."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def marks(key: int) -> tuple[float, float]:
    """20 bits of a key, and their square: to be summed over replicas and judged by `all_equal`."""
    mark = mix64(key & MASK64) >> 44
    return float(mark), float(mark * mark)


def all_equal(total: float, total_of_squares: float, replicas: int) -> bool:
    """Whether all replicas had the same mark: equality in Cauchy and Schwarz. The same answer on every replica.

    Exact in float64 up to 4096 replicas. Different keys have the same mark once in a million.
    """
    return replicas * total_of_squares == total * total


def derive_key(*parts: int) -> int:
    """One 64-bit key from integers in order: a different key for every different sequence, as far as 64 bits go."""
    key = len(parts)
    for part in parts:
        key = mix64(key ^ mix64(part & MASK64))
    return key


@dataclass(frozen=True)
class Coverage:
    """Which examples, as a multiset: `hash` is the sum of `mix64(id)` modulo 2**64, `count` how many."""

    hash: int = 0
    count: int = 0

    @classmethod
    def of(cls, ids: Iterable[int]) -> Coverage:
        """Coverage of these ids; an id that occurs twice counts twice."""
        total = count = 0
        for example_id in ids:
            total += mix64(int(example_id) & MASK64)
            count += 1
        return cls(total & MASK64, count)

    def __add__(self, other: Coverage) -> Coverage:
        return Coverage((self.hash + other.hash) & MASK64, self.count + other.count)

    def __str__(self) -> str:
        return f"{self.hash:016x}/{self.count}"


def count(value: int, one: str) -> str:
    """A count and its noun: 1 example, 1,000 examples."""
    plural = "es" if one.endswith("ch") else "s"
    return f"{value:,} {one if value == 1 else one + plural}"
