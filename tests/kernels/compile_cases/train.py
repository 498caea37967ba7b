"""The variants in which the engine launches the kernels of `kernels/train`."""

from __future__ import annotations

from functools import partial

from batchspec.kernels.common.card import INTERPRETER, Card
from batchspec.kernels.train.prefix_attention import tile_of
from tests.kernels.compile_cases.cases import I32, PF32, PI32, PI64, Cases

CASES = Cases("train")
case = CASES.add


def prefix_tile(head_dim: int, itemsize: int, card: Card) -> tuple[dict[str, object], int]:
    queries, keys, stages = tile_of(head_dim, itemsize, card)
    return {"QUERIES": queries, "KEYS": keys}, stages


for _dtype in ("fp32", "bf16", "fp16", "fp64"):
    _acc = "fp64" if _dtype == "fp64" else "fp32"
    for _distance, _share in ((None, 0.0), (f"*{_acc}", 0.9)):
        case(f"soft_cross_entropy_kernel {_dtype}, share {_share}", "soft_cross_entropy", 8, logits=f"*{_dtype}",
             probs=f"*{_acc}", weights=f"*{_acc}", best_ids=PI64, out_loss=f"*{_acc}", out_hits=f"*{_acc}",
             out_distance=_distance, SHARE=_share, ACC=_acc, BLOCK=4096)
    case(f"rope_train_kernel {_dtype}", "rope_train", 4, x=f"*{_dtype}", cos=f"*{_acc}", sin=f"*{_acc}", out=f"*{_dtype}",
         HEADS=9, D=64, HALF=32, ACC=_acc, ROWS=32)
    case(f"swiglu_train_kernel {_dtype}", "swiglu_train", 8, gate=f"*{_dtype}", up=f"*{_dtype}", out=f"*{_dtype}", ACC=_acc,
         BLOCK=2048)
    case(f"swiglu_train_backward_kernel {_dtype}", "swiglu_train", 8, gate=f"*{_dtype}", up=f"*{_dtype}", grad=f"*{_dtype}",
         out_gate=f"*{_dtype}", out_up=f"*{_dtype}", ACC=_acc, BLOCK=2048)
_STEP_SIZES = {"num_tokens": I32, "length": I32, "step_stride": I32, "scale": "fp32", "HEADS": 9, "KEY_HEADS": 3, "D": 64,
        "LANES": 64,
        "TOKENS": 16}
for _dtype in ("bf16", "fp16"):
    _values = f"*{_dtype}"
    case(
        f"draft_step_attention_kernel {_dtype}",
        "draft_step_attention",
        4,
        q=_values,
        causal=_values,
        causal_lse=PF32,
        step_k=_values,
        step_v=_values,
        out=_values,
        out_lse=PF32,
        steps=I32,
        **_STEP_SIZES,
    )
    case(
        f"draft_step_queries_backward_kernel {_dtype}",
        "draft_step_attention",
        4,
        q=_values,
        grad=_values,
        out=_values,
        lse=PF32,
        step_k=_values,
        step_v=_values,
        grad_q=_values,
        steps=I32,
        **_STEP_SIZES,
    )
    case(
        f"draft_step_keys_backward_kernel {_dtype}",
        "draft_step_attention",
        4,
        q=_values,
        grad=_values,
        out=_values,
        lse=PF32,
        step_k=_values,
        step_v=_values,
        out_k=_values,
        out_v=_values,
        **_STEP_SIZES,
    )
for _dtype, _bytes, _sizes in (("bf16", 2, (64, 128, 256, 512)), ("fp16", 2, (64,)), ("fp32", 4, (64, 128, 256))):
    _values = f"*{_dtype}"
    _prefix = {"q": _values, "k": _values, "v": _values, "starts": PI32, "limits": PI32}
    _backward = {"grad": _values, "lse": PF32, "delta": PF32}
    for _name, _own in (
        ("prefix_attention", {"out": _values, "out_lse": PF32}), ("prefix_queries_backward", {**_backward, "out_q": _values}),
        ("prefix_keys_backward", {**_backward, "out_k": _values, "out_v": _values}),
    ):
        for _size in _sizes:
            _of_card = partial(prefix_tile, _size, _bytes)
            _constants, _stages = _of_card(INTERPRETER)
            case(f"{_name}_kernel {_dtype}, {_size} wide", "prefix_attention", 4, stages=_stages, of_card=_of_card, **_prefix,
                 **_own, scale="fp32", HEADS=9, KEY_HEADS=3, D=_size, LANES=_size, **_constants)
