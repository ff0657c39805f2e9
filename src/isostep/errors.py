"""Errors that isostep raises. Each message says what was got, what was expected, and what to do."""

from __future__ import annotations


class IsostepError(Exception):
    """Base of every error that isostep raises on purpose. `exit_code` is what the command line returns."""

    exit_code = 1


class InputError(IsostepError, ValueError):
    """A value that the caller gave cannot be used; nothing was changed."""

    exit_code = 2

    @classmethod
    def of(cls, name: str, got: object, expected: str, remedy: str) -> InputError:
        """One line that names the offending value: got, expected, do this."""
        return cls(f"{name}: got {got!r}, expected {expected}; {remedy}")


def of_system(error: OSError) -> IsostepError:
    """The line for an error of the operating system that nobody has put into words."""
    return IsostepError(f"got {error}, expected room and access; free space or mend access, then run it again")


class CoverageError(IsostepError):
    """The examples that went into forward are not the group's. Raised before the optimizer runs."""


class AbandonedError(IsostepError):
    """A stop request left too little time for the update under way; every replica dropped it, and applied nothing."""


class NonFiniteError(IsostepError):
    """A gradient is inf or NaN. Raised before the optimizer runs; the parameters are as before the update."""


class OutOfMemoryError(IsostepError):
    """Memory ran out where a smaller microbatch cannot be tried: at one example, or after the vote."""


class PeerError(IsostepError):
    """Another replica failed. The update was applied by nobody; this replica can go on if the others can."""


class PeerLostError(PeerError):
    """Another replica is gone, or did not answer in time. The process group has ended."""
