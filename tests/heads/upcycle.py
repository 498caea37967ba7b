"""A developer's tool: makes MoE, FP8, INT4, NVFP4 and MXFP4 models from a dense Llama-like model, and compares their outputs.

    python -m tests.heads.upcycle make smollm2-135m /tmp/made
    python -m tests.heads.upcycle compare smollm2-135m /tmp/made/fp8_block prompts.parquet

`make` writes one folder per model:

fp8_block         the dense model with its projections in FP8, one scale per block of 128 x 128
fp8_channel       the dense model with its projections in FP8, one scale per row (compressed-tensors)
int4, gptq, awq   the dense model with its projections in INT4, rounded to the nearest code of groups of 32: compressed-tensors,
                  symmetric; GPTQ in act order and AWQ with zero points
nvfp4, nvfp4_ct   the dense model with its projections in NVFP4, of ModelOpt and of compressed-tensors
fp8_nvfp4         the same with attention in FP8, one scale per row (compressed-tensors)
moe               a Mixtral whose experts are copies of the dense MLP, with a random router. The weights of a token's experts sum
                  to 1, so up to rounding it computes the same function as the dense model
moe_fp8_block, moe_fp8_channel, moe_int4, moe_nvfp4   moe in FP8, in INT4 of compressed-tensors and in NVFP4 of ModelOpt
gpt_oss           a gpt-oss with the same function up to rounding: attention sinks of weight 0, no sliding windows, a clamp that
                  no activation reaches, and an up bias of -1, because gpt-oss multiplies by up + 1. In bf16 rounding up - 1 loses
                  digits of up: compare in float32
gpt_oss_mxfp4     gpt_oss with its experts in MXFP4; compare it with gpt_oss

`compare` decodes prompts greedily with the first model and computes the next-token distributions of both models along these
outputs. It prints the mean KL divergence KL(first || second) and the share of positions at which the likeliest tokens differ.
--quantize fp8 quantises the second one at load (model.quantize), which may then be the first one; --activations fp8 quantises its
activations too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from batchspec import run
from batchspec.checkpoint.files import LocalFiles, weight_names
from batchspec.checkpoint.hub import resolve_model
from batchspec.heads.data import Row
from batchspec.heads.teacher import Teacher
from batchspec.job.prepare import choose_device
from batchspec.model.dtype import DTYPES
from batchspec.model.spec import ModelSpec, load_spec
from batchspec.model.target import Target
from tests.helpers.four_bit_models import FOUR_BITS, PROJECTIONS, packed
from tests.helpers.nvfp4_layouts import E2M1

Tensors = dict[str, Tensor]
BLOCK, FP8_MAX = 128, 448.0
SPLITS = {".w1": ".gate_proj", ".w3": ".up_proj", ".w2": ".down_proj"}
"""Mixtral's names of an expert's projections -> Llama's names of an MLP's."""
FP8_BLOCK: dict[str, Any] = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["lm_head", "block_sparse_moe.gate"],
}
_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
FP8_CHANNEL: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head", "re:.*block_sparse_moe\\.gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "weights": {**_FLOAT8, "dynamic": False, "strategy": "channel"},
            "input_activations": {**_FLOAT8, "dynamic": True, "strategy": "token"},
        }
    },
}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
}
UNREACHED = 1e4
"""The limit of gpt-oss's clamp, which no activation reaches. An attention sink with minus this logit has weight 0."""
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")


def make(source: Path, out: Path, *, num_experts: int, top_k: int = 2) -> list[Path]:
    """Write the folders of all models and return them. Raises ValueError for another architecture than Llama, or with biases."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] not in ("llama", "mistral") or config.get("mlp_bias") or config.get("attention_bias"):
        raise ValueError(
            f"{source}: model_type is {config['model_type']}, or it has biases; use a Llama or Mistral without biases"
        )
    dense: Tensors = {}
    for file in weight_names(LocalFiles(source)):
        dense |= load_file(source / file)
    experts = {"num_local_experts": num_experts, "num_experts_per_tok": top_k}
    moe = mixtral(dense, num_experts)
    moe_config = config | experts | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "sliding_window": None}
    oss, oss_config = gpt_oss(dense, num_experts, config["num_attention_heads"]), gpt_oss_config(config) | experts
    made = [
        ("fp8_block", fp8(dense, fp8_block, "_scale_inv"), config | {"quantization_config": FP8_BLOCK}),
        ("fp8_channel", fp8(dense, fp8_channel, "_scale"), config | {"quantization_config": FP8_CHANNEL}),
        *((name, packed(dense, name), config | {"quantization_config": own.config}) for name, own in FOUR_BITS.items()),
        ("moe", moe, moe_config),
        ("moe_fp8_block", fp8(moe, fp8_block, "_scale_inv"), moe_config | {"quantization_config": FP8_BLOCK}),
        ("moe_fp8_channel", fp8(moe, fp8_channel, "_scale"), moe_config | {"quantization_config": FP8_CHANNEL}),
        *(
            (f"moe_{name}", packed(moe, name), moe_config | {"quantization_config": FOUR_BITS[name].config})
            for name in ("int4", "nvfp4")
        ),
        ("gpt_oss", oss, oss_config),
        ("gpt_oss_mxfp4", mxfp4(oss), oss_config | {"quantization_config": MXFP4}),
    ]
    return [write_model(source, out / name, tensors, values) for name, tensors, values in made]


def write_model(source: Path, folder: Path, tensors: Tensors, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "generation_config.json",
    ):
        if (source / name).is_file():
            shutil.copy(source / name, folder / name)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder


def _of_mlp(name: str) -> bool:
    return ".mlp." in name


def _router(dense: Tensors, layer: str, num_experts: int) -> Tensor:
    """A router's matrix [E, H] of noise, different in each layer. Logits of normed tokens differ by about 1."""
    gate = dense[f"{layer}mlp.gate_proj.weight"]
    generator = torch.Generator().manual_seed(int(layer.split(".")[2]))
    return torch.randn(num_experts, gate.shape[1], generator=generator).mul_(gate.shape[1] ** -0.5).to(gate.dtype)


def _layers(dense: Tensors) -> list[str]:
    return [name.removesuffix("mlp.gate_proj.weight") for name in dense if name.endswith("mlp.gate_proj.weight")]


def mixtral(dense: Tensors, num_experts: int) -> Tensors:
    """The tensors of a Mixtral whose experts are copies of the dense MLP; see `moe` in the module's docstring."""
    made = {name: tensor for name, tensor in dense.items() if not _of_mlp(name)}
    for layer in _layers(dense):
        made[f"{layer}block_sparse_moe.gate.weight"] = _router(dense, layer, num_experts)
        for expert in range(num_experts):
            for own, name in SPLITS.items():
                made[f"{layer}block_sparse_moe.experts.{expert}{own}.weight"] = dense[f"{layer}mlp{name}.weight"].clone()
    return made


def gpt_oss(dense: Tensors, num_experts: int, num_heads: int) -> Tensors:
    """The tensors of a gpt-oss; experts stacked and transposed, gate and up interleaved, as transformers saves them."""
    made = {name: tensor for name, tensor in dense.items() if not _of_mlp(name)}
    for layer in _layers(dense):
        gate, up, down = (dense[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        joined = torch.stack([gate, up], 1).flatten(0, 1)
        bias = torch.zeros(len(joined), dtype=gate.dtype)
        bias[1::2] = -1.0
        at = f"{layer}mlp."
        made[f"{at}router.weight"] = _router(dense, layer, num_experts)
        made[f"{at}router.bias"] = torch.zeros(num_experts, dtype=gate.dtype)
        for name, weight, own in (("gate_up_proj", joined, bias), ("down_proj", down, torch.zeros(len(down), dtype=down.dtype))):
            made[f"{at}experts.{name}"] = weight.t().expand(num_experts, -1, -1).clone()
            made[f"{at}experts.{name}_bias"] = own.expand(num_experts, -1).clone()
        made[f"{layer}self_attn.sinks"] = torch.full((num_heads,), -UNREACHED, dtype=gate.dtype)
    return made


def gpt_oss_config(config: dict[str, Any]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {"rope_type": "default"}
    return {key: value for key, value in config.items() if key not in ROPE_KEYS} | {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "attention_bias": False, "swiglu_alpha": 1.0,
        "swiglu_limit": UNREACHED, "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "num_key_value_heads": config.get("num_key_value_heads", heads), "sliding_window": None,
        "layer_types": ["full_attention"] * config["num_hidden_layers"],
        "rope_parameters": {"rope_theta": config.get("rope_theta", 10_000.0), **rope},
    }


def fp8(tensors: Tensors, quantise: Callable[[Tensor], tuple[Tensor, Tensor]], suffix: str) -> Tensors:
    """Quantise every projection of the layers except routers to e4m3 and scales. suffix: of the scale's name, after `.weight`."""
    made: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(PROJECTIONS):
            made[name], made[f"{name}{suffix}"] = quantise(tensor.float())
        else:
            made[name] = tensor
    return made


def fp8_block(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> e4m3 [N, K] and scales fp32 [ceil(N / 128), ceil(K / 128)]; the largest number of a block becomes 448."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    scale = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).abs().amax((1, 3)).clamp(min=1e-12) / FP8_MAX
    spread = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return (weight / spread).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def fp8_channel(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> e4m3 [N, K] and scales bf16 [N, 1]; the largest number of a row becomes 448."""
    scale = (weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / FP8_MAX).bfloat16()
    return (weight / scale.float()).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale


def mxfp4(tensors: Tensors) -> Tensors:
    """Quantise the experts of a gpt-oss to blocks [E, N, K / 32, 16] and scales [E, N, K / 32], as gpt-oss is published."""
    made: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            pairs = [mxfp4_blocks(expert.t().float()) for expert in tensor]
            made[f"{name}_blocks"], made[f"{name}_scales"] = (torch.stack(part) for part in zip(*pairs, strict=True))
        else:
            made[name] = tensor
    return made


def mxfp4_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] -> blocks uint8 [N, K / 32, 16] and scales uint8 [N, K / 32].

    The scale of 32 numbers is 2^(e - 2), e the exponent of the largest magnitude (OCP MX v1.0). Each number becomes the nearest
    value of E2M1; of two neighbours the first goes into the low half of a byte.
    """
    groups = weight.unflatten(1, (-1, 32))
    exponent = groups.abs().amax(-1, keepdim=True).clamp(min=2.0**-100).log2().floor() - 2
    steps = torch.tensor([(low + high) / 2 for low, high in itertools.pairwise(E2M1)])
    codes = torch.bucketize((groups / 2**exponent).abs(), steps) + 8 * (groups < 0)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8), (exponent.squeeze(-1) + 127).to(torch.uint8)


@dataclass(frozen=True, slots=True)
class Comparison:
    mean_kl: float
    """KL(reference || other) of the next token, in nats, mean over output positions."""
    changed: float
    """Share of output positions at which the likeliest tokens of the two models differ."""
    positions: int

    def __str__(self) -> str:
        return f"mean KL {self.mean_kl:.3g}, {self.changed:.2%} of {self.positions:,} greedy tokens changed"


@torch.inference_mode()
def compare(
    reference: Path, other: Path, prompts: str, *, rows: int, tokens: int, chat: bool = False, dtype: str = "auto",
    batch: int = 8, quantize: str | None = None, activations: str = "dtype",
) -> Comparison:
    """Compare both models along the reference's greedy outputs.

    dtype                  in which both models compute; auto is bfloat16 on a GPU, float32 on a CPU
    quantize, activations  of the other one, as the keys of `model`
    """
    device = choose_device("auto")
    dtype = ("bfloat16" if device.type == "cuda" else "float32") if dtype == "auto" else dtype
    outputs = _greedy(reference, prompts, rows=rows, tokens=tokens, chat=chat, dtype=dtype)
    first = _teacher(reference, load_spec(reference), DTYPES[dtype], device)
    spec = load_spec(other).quantised(quantize).on(device, DTYPES[dtype], activations)
    second = _teacher(other, spec, DTYPES[dtype], device)
    divergence, changed, count = 0.0, 0, 0
    for at in range(0, len(outputs), batch):
        p, q = (teacher.training_batch(outputs[at : at + batch]).probs[:].double() for teacher in (first, second))
        divergence += float(torch.where(p > 0, p * (p.clamp(min=1e-300).log() - q.clamp(min=1e-300).log()), 0.0).sum())
        changed += int((p.argmax(-1) != q.argmax(-1)).sum())
        count += len(p)
    return Comparison(divergence / max(count, 1), changed / max(count, 1), count)


def _teacher(folder: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Teacher:
    target = Target.load(folder, spec, dtype=dtype, device=device)
    return Teacher(target, (0,), torch.arange(spec.vocab_size), torch.float32)


def _greedy(folder: Path, prompts: str, *, rows: int, tokens: int, chat: bool, dtype: str) -> list[Row]:
    """The model's greedy outputs, made by a batchspec job."""
    with tempfile.TemporaryDirectory() as out:
        asked = [
            f"model.path={folder}", f"model.dtype={dtype}", f"input.path={prompts}", f"input.limit={rows}", f"input.chat={chat}",
            f"output.dir={out}/out", "output.token_ids=true", "output.prompt_ids=true", f"decode.max_new_tokens={tokens}",
        ]
        if code := run.main(asked):
            raise SystemExit(code)
        found = pl.read_parquet(f"{out}/out/data").filter(pl.col("token_ids").is_not_null())
    return [
        Row(ids=pl.concat([prompt, answer]).to_numpy(), prompt_len=len(prompt))
        for prompt, answer in zip(found["prompt_ids"], found["token_ids"], strict=True)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("model")
    making.add_argument("out", type=Path)
    making.add_argument("--experts", type=int, default=8)
    comparing = commands.add_parser("compare")
    for name in ("reference", "other", "prompts"):
        comparing.add_argument(name)
    comparing.add_argument("--rows", type=int, default=64)
    comparing.add_argument("--tokens", type=int, default=128)
    comparing.add_argument("--chat", action="store_true", help="apply the chat template to the column `prompt`")
    comparing.add_argument("--dtype", default="auto", choices=("auto", *DTYPES))
    comparing.add_argument("--quantize", choices=["fp8"])
    comparing.add_argument("--activations", default="dtype", choices=["dtype", "fp8"])
    args = parser.parse_args(argv)
    if args.command == "make":
        for folder in make(resolve_model(args.model), args.out, num_experts=args.experts):
            print(folder)
        return 0
    reference, other = resolve_model(args.reference), resolve_model(args.other)
    found = compare(
        reference, other, args.prompts, rows=args.rows, tokens=args.tokens, chat=args.chat, dtype=args.dtype,
        quantize=args.quantize, activations=args.activations,
    )
    print(found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
