"""no_repeat_ngram by its definition."""

from __future__ import annotations

from collections.abc import Sequence


def forbidden(output: Sequence[int], rule: tuple[int, int, Sequence[int]] | None) -> set[int]:
    """The tokens that a rule (n, window, exceptions) forbids after an output: the loop of vLLM's NoRepeatNGramLogitsProcessor.
    With n = 1, which that ignores, every token of the window. n = 0 and None: none."""
    size, window, listed = rule or (0, 0, ())
    if size == 0 or len(output) < size:
        return set()
    prefix, found = output[len(output) - (size - 1) :], set[int]()
    for i in range(max(0, len(output) - window), len(output) - size + 1):
        if output[i : i + size - 1] == prefix:
            found.add(output[i + size - 1])
    return found - {*listed}
