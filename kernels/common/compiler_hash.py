"""Triton's checksum of itself."""

from __future__ import annotations

from triton.runtime import cache


def compiler_hash() -> str | None:
    """The checksum of the installed Triton, which it computes once a process; None if this version has no such function."""
    key = getattr(cache, "triton_key", None)
    return None if key is None else str(key())
