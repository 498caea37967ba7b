"""What a layer keeps, costs and reads is asked through `batchspec/model/layers/kind.py`: little else names a kind of layer."""

from __future__ import annotations

import re

from tests.house.test_imports import module_of, sources

NAMES = re.compile(
    r"AttentionSpec|GatedDeltaSpec|ShortConvSpec|Mamba2Spec|LatentSpec|[Ss]hort_?conv|is_recurrent|recurren|\bwindows\b|kv_heads|head_dim|inner_size|kv_size|\battentions|\bkv_of\b"
)
THEIR_OWN = ("kernels", "conf", "model.layers", "model.families", "model.vision", "draft", "heads", "bench")
"""Packages of kinds of layers, of families made of them, of vision encoders with layers of their own, and of draft heads."""
MOST_LINES = 37
"""Among them the windows of page groups, keys of config.json, and what messages say."""


def test_few_lines_name_a_kind_of_layer_outside_of_packages_of_their_own() -> None:
    found = [
        f"{module}:{number}: {line.strip()}"
        for path in sources()
        if not (module := module_of(path)).startswith(tuple(f"{name}." for name in THEIR_OWN)) and module not in THEIR_OWN
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if NAMES.search(line)
    ]
    assert len(found) <= MOST_LINES, "\n".join(found)
