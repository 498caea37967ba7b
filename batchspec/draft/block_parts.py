"""The parts of a head for blocks beside its layers, which its tensors decide: names of tensors, and what they say.

Markov matrices, confidence   DSpark (arXiv 2607.05147)
convolutions, selector        DFlash2 (https://github.com/z-lab/dflash, dflash/model.py)
H hidden, V vocabulary, A taps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from batchspec.checkpoint.config_values import ConfigReader
from batchspec.checkpoint.files import StoredTensor
from batchspec.draft.block_keys import MOST_RANK
from batchspec.kernels.drafting.block_conv import MOST_TAPS

MARKOV, MARKOV_OUT = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
CONFIDENCE, CONFIDENCE_BIAS = "confidence_head.proj.weight", "confidence_head.proj.bias"
PREDECESSORS, SUCCESSORS = "candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"
SELECTOR = "candidate_selector.hidden_projection"
CONVS = ("attention_conv", "mlp_conv")
"""Convolutions of a layer around its attention and its MLP, by their names in the layer."""
BASE_KERNEL, KERNELS = "base_kernel", "kernel_projection"

_UNSUPPORTED = {
    "markov_head.gate_proj.": "a gated Markov head", "markov_head.joint_proj.": "a Markov head with a recurrent state",
    "hc_": "DeepSeek-V4's layers",
}
"""Parts of tensors' names -> what they are."""
_ANOTHER = "draft.path must be a DFlash, DFlash2 or DSpark head"
_DIMENSIONS = {MARKOV: 2, MARKOV_OUT: 2, CONFIDENCE: 2, PREDECESSORS: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockParts:
    """Which parts a head has."""

    markov_rank: int = 0
    """Rank of the bias that the token before a draft adds to its logits; 0: none."""
    confidence: Literal["none", "hidden", "markov"] = "none"
    """What its estimate of being accepted reads: the state, or also the token before."""
    selector_rank: int = 0
    """Rank of the scores of candidates, given the token before and the state; 0: there is no selector."""
    conv_taps: int = 0
    """Number of queries that each convolution within the block reads, its own included; 0: layers have none."""
    conv_groups: int = 0
    """Number of groups of neighbouring channels that share what a state adds to the taps."""

    @property
    def of_dflash2(self) -> bool:
        return self.selector_rank > 0 or self.conv_taps > 0


def read_parts(config: ConfigReader, own: ConfigReader, stored: Mapping[str, StoredTensor], hidden_size: int) -> BlockParts:
    """The parts of a head with these tensors, by normalised name.

    own  the config's keys of the head
    Raises CheckpointError for parts that are not supported, and if the keys say otherwise.
    """
    markov_rank = stored[MARKOV].shape[1] if MARKOV in stored else 0
    selector_rank = stored[PREDECESSORS].shape[1] if PREDECESSORS in stored else 0
    taps, groups = _convolutions(config, stored, hidden_size)
    confidence: Literal["none", "hidden", "markov"] = "none"
    if CONFIDENCE in stored:
        confidence = "hidden" if stored[CONFIDENCE].shape[-1] == hidden_size or not markov_rank else "markov"
    for key, found, what in (
        ("markov_rank", markov_rank, f"the Markov matrices have rank {markov_rank}"),
        ("selector_rank", selector_rank, f"the candidate selector has rank {selector_rank}"),
        ("conv_kernel_size", taps, f"the convolutions have {taps} taps"),
        ("conv_group_size", hidden_size // groups if groups else 0, f"the convolutions have {groups} groups"),
    ):
        if own.integer(key, found) != found:
            raise own.refusal(f"{own.shown(key)}, but {what}; correct it")
    for name, rank in (("Markov matrices", markov_rank), ("matrices of the candidate selector", selector_rank)):
        if rank > MOST_RANK:
            raise own.refusal(f"the {name} have rank {rank}; supported is at most {MOST_RANK:,}")
    if selector_rank and (markov_rank or confidence != "none"):
        raise own.refusal("a candidate selector and a Markov or confidence head; one of them is supported, not both")
    if own.flag("enable_confidence_head") and confidence == "none":
        raise own.refusal("enable_confidence_head true, but the weights have no confidence_head; set it false")
    return BlockParts(
        markov_rank=markov_rank, confidence=confidence, selector_rank=selector_rank, conv_taps=taps, conv_groups=groups
    )


def _convolutions(config: ConfigReader, stored: Mapping[str, StoredTensor], hidden_size: int) -> tuple[int, int]:
    """Taps and groups, of the first convolution; (0, 0) without any. `expected_tensors` tells whether all layers have them."""
    base = next((name for name in sorted(stored) if name.endswith(f"_conv.{BASE_KERNEL}")), None)
    if base is None:
        return 0, 0
    kernels = base.removesuffix(BASE_KERNEL) + f"{KERNELS}.weight"
    if kernels not in stored:
        raise config.refusal(f"{base} without {kernels}; export the head again")
    shape, rows = stored[base].shape, stored[kernels].shape[0] if stored[kernels].shape else 0
    taps = shape[1] if len(shape) == 3 else 0
    if not 1 <= taps <= MOST_TAPS:
        raise config.refusal(f"{base} is {list(shape)}; it must be [2, taps, {hidden_size}] with at most {MOST_TAPS} taps")
    groups = rows // (2 * taps)
    if not groups or rows % (2 * taps) or hidden_size % groups:
        raise config.refusal(f"{kernels} has {rows} rows; it must have {2 * taps} times a divisor of hidden_size {hidden_size}")
    return taps, groups


def refuse_tensors(config: ConfigReader, stored: Mapping[str, StoredTensor]) -> None:
    """Raise CheckpointError for what is no head for blocks, or has parts that are not computed."""
    for part, what in _UNSUPPORTED.items():
        if found := next((name for name in stored if name.startswith(part) or f".{part}" in name), None):
            raise config.refusal(
                f"{found}: {what}, which is not supported; use a DFlash head, or a DSpark head with a plain Markov head"
            )
    for name, dimensions in _DIMENSIONS.items():
        if name in stored and len(stored[name].shape) != dimensions:
            raise config.refusal(f"{name} is {list(stored[name].shape)}; it must have two dimensions: export the head again")
    if "hidden_norm.weight" not in stored or "fc.weight" not in stored:
        raise config.refusal(f"the weights have no fc and hidden_norm; {_ANOTHER} (draft=eagle3 is for EAGLE-3 heads)")
