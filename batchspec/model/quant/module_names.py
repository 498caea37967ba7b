"""Whether the name of a module is one of those that quantization_config lists, or matches one of its expressions.

A model with experts has 100,000 names, and a checkpoint may list hundreds of modules, so all are one regular expression.
"""

from __future__ import annotations

import re
from functools import lru_cache

from batchspec.checkpoint.name_patterns import NamePattern, joined
from batchspec.checkpoint.wrapped import names_in_files


def is_in(modules: tuple[str, ...], name: str) -> bool:
    """Whether a module is one of these, or is inside one. They are names, or ends or parts of names, such as `self_attn`."""
    return bool(modules) and _inside(modules).match(name) is not None


def begins_with(patterns: tuple[str, ...], name: str) -> bool:
    """Whether the name begins with a match of an expression. Those that name the language model of a larger model, or a backbone,
    match its names in the file."""
    own, wrapped = _joined(patterns)
    if any(pattern.begins(name) for pattern in own):
        return True
    return bool(wrapped) and any(pattern.begins(other) for other in names_in_files(name) for pattern in wrapped)


@lru_cache(64)
def _inside(modules: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"(?:^|.*\.)(?:{'|'.join(map(re.escape, modules))})(?:\.|$)")


@lru_cache(64)
def _joined(patterns: tuple[str, ...]) -> tuple[tuple[NamePattern, ...], tuple[NamePattern, ...]]:
    """The expressions for the names that batchspec uses, and for those in files."""
    # Most do not name one, and it takes several matches of each name.
    wrapped = [pattern for pattern in patterns if "language" in pattern or "backbone" in pattern]
    return joined([pattern for pattern in patterns if pattern not in wrapped]), joined(wrapped)
