"""decode.deterministic with quantised weights and K/V: whole models, their kernels interpreted.

Products of tiles sum in the order of K, as tensor cores do. `test_gpu_deterministic_formats.py` runs the same models on a GPU.
"""

from __future__ import annotations

import pytest
import torch

from tests.helpers.interpreter import dots_of_one_order
from tests.helpers.ordered_formats import FORMATS, computed, made
from tests.model.test_expert_kernels import kernels

pytestmark = [
    pytest.mark.second,
    pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted; test_gpu_deterministic_formats.py runs on a GPU"),
]
SIZES = {
    "hidden_size": 144, "intermediate_size": 144, "moe_intermediate_size": 144, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 61, "max_position_embeddings": 128,
}


ALIKE = ("bf16, K/V in FP8", "FP8 by tensors, calibrated", "experts in FP8 by channels", "INT4 in groups of 32")
"""Their products and caches are those of others: a scale alone is another one."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in ALIKE else ()) for name in FORMATS])
def test_keys_values_and_logits_are_those_of_a_prompt_in_one_pass_however_it_is_cut(name: str) -> None:
    """A prefill of 80 tokens, shorter ones, rounds of 1 to 4 tokens, alone and among other rows."""
    with kernels(torch.bfloat16), dots_of_one_order():
        own = made(name, torch.device("cpu"), **SIZES)
        ids = torch.randint(0, 61, (80,), dtype=torch.int32)
        kv, logits = computed(own, ids, [80])
        assert logits.isfinite().all()
        for cuts, others in (([70, 71, 75, 79, 80], 0), ([1, 66, 68, 80], 2)):
            other_kv, other_logits = computed(own, ids, cuts, others=others)
            assert torch.equal(other_kv, kv), cuts
            assert torch.equal(other_logits, logits), cuts
