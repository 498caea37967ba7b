"""Checkpoint weights: which tensors a spec needs, checked against the safetensors headers before one byte is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from batchspec.errors import CheckpointError
from batchspec.model.config_values import read_json
from batchspec.model.spec import ModelSpec

Shapes = dict[str, tuple[int, ...]]
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 14


class Weights(Protocol):
    """Where a model's tensors come from."""

    def tensor(self, name: str) -> Tensor:
        """The tensor of that Hugging Face name, in the model's dtype, on its device."""


def expected_shapes(spec: ModelSpec) -> Shapes:
    """Every tensor of the checkpoint by its Hugging Face name; lm_head.weight only where it is not tied."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: Shapes = {"model.embed_tokens.weight": (spec.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not spec.tie:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    linears = [
        ("self_attn.q_proj", (q, hidden), spec.qkv_bias),
        ("self_attn.k_proj", (kv, hidden), spec.qkv_bias),
        ("self_attn.v_proj", (kv, hidden), spec.qkv_bias),
        ("self_attn.o_proj", (hidden, q), spec.o_bias),
        ("mlp.gate_proj", (inner, hidden), spec.mlp_bias),
        ("mlp.up_proj", (inner, hidden), spec.mlp_bias),
        ("mlp.down_proj", (hidden, inner), spec.mlp_bias),
    ]
    norms = [("input_layernorm", hidden), ("post_attention_layernorm", hidden)]
    if spec.qk_norm:
        norms += [("self_attn.q_norm", spec.head_dim), ("self_attn.k_norm", spec.head_dim)]
    for i in range(spec.num_layers):
        prefix = f"model.layers.{i}."
        for name, shape, bias in linears:
            shapes[f"{prefix}{name}.weight"] = shape
            if bias:
                shapes[f"{prefix}{name}.bias"] = shape[:1]
        for name, size in norms:
            shapes[f"{prefix}{name}.weight"] = (size,)
    return shapes


class Checkpoint:
    """The safetensors files of a folder, opened and checked; a context manager, since it holds them open.

    Raises CheckpointError where there are none, or naming every missing, unexpected and misshapen tensor at once.
    """

    def __init__(self, folder: Path, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        self._folder, self._dtype, self._device = folder, dtype, device
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        with self._stack:
            for path in weight_files(folder).paths:
                handle = self._open(path)
                self._files.update(dict.fromkeys(handle.keys(), handle))
            self._check(spec)
            self._stack = self._stack.pop_all()

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor.to(device=self._device, dtype=self._dtype)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _open(self, path: Path) -> Any:
        try:
            return self._stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: cannot be read as safetensors ({error}); download the file again") from None

    def _check(self, spec: ModelSpec) -> None:
        expected, problems = expected_shapes(spec), []
        tied_head = spec.tie and "lm_head.weight" in self._files
        if tied_head:
            expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
        missing = sorted(expected.keys() - self._files.keys())
        unexpected = sorted(name for name in self._files.keys() - expected.keys() if not name.endswith("rotary_emb.inv_freq"))
        for title, names in (("missing", missing), ("unexpected", unexpected)):
            if names:
                problems.append(f"{len(names)} {title} tensors: {', '.join(names)}")
        for name in sorted(expected.keys() & self._files.keys()):
            shape = tuple(self._files[name].get_slice(name).get_shape())
            if shape != expected[name]:
                problems.append(f"{name} is {list(shape)}, config.json says {list(expected[name])}")
        if not problems and tied_head:
            head, embedding = (self._files[n].get_tensor(n) for n in ("lm_head.weight", "model.embed_tokens.weight"))
            if not torch.equal(head, embedding):
                problems.append("lm_head.weight differs from the embedding although tie_word_embeddings is true")
        if problems:
            raise CheckpointError(f"{self._folder}: the weights do not fit config.json: {'; '.join(problems)}")


class DummyWeights:
    """Noise of the right shapes from the spec alone: N(0, 0.02^2), norms 1; the same in every run on one kind of device."""

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        self._shapes, self._dtype, self._device = expected_shapes(spec), dtype, device
        self._generator = torch.Generator(device).manual_seed(0)

    def tensor(self, name: str) -> Tensor:
        out = torch.empty(self._shapes[name], dtype=self._dtype, device=self._device)
        if name.endswith("norm.weight"):
            return out.fill_(1.0)
        return out.normal_(0.0, 0.02, generator=self._generator)


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The safetensors files that hold a model."""

    paths: tuple[Path, ...]

    @property
    def fingerprint(self) -> str:
        """sha256 of names, sizes, safetensors headers and samples of each file: two fine-tunes differ in the samples only."""
        digest = sha256()
        for path in self.paths:
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                digest.update(file.read(min(length, _MAX_HEADER_BYTES)))
                data, size = file.tell(), path.stat().st_size
                for sample in range(_SAMPLES):
                    file.seek(data + (size - data) * sample // _SAMPLES)
                    digest.update(file.read(_SAMPLE_BYTES))
        return digest.hexdigest()


def weight_files(folder: Path) -> WeightFiles:
    """Those of the index, or model.safetensors. Raises CheckpointError where there are none or some are missing."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({folder / str(name) for name in read_json(index).get("weight_map", {}).values()})
        absent = [path.name for path in files if not path.is_file()]
        if absent or not files:
            names = ", ".join(absent) or "the index names none"
            raise CheckpointError(f"{folder}: {len(absent)} of {len(files)} weight files missing: {names}; download again")
        return WeightFiles(tuple(files))
    if (folder / "model.safetensors").is_file():
        return WeightFiles((folder / "model.safetensors",))
    if others := sorted(path.name for path in _pickled(folder)):
        raise CheckpointError(f"{folder}: only {', '.join(others)}: safetensors only; save the model again as safetensors")
    raise CheckpointError(f"{folder}: no weights: neither model.safetensors nor model.safetensors.index.json; check model.path")


def _pickled(folder: Path) -> Iterator[Path]:
    for pattern in ("pytorch_model*.bin", "*.pth", "*.pt"):
        yield from folder.glob(pattern)
