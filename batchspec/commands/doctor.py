"""`batchspec doctor`: print what this machine offers for a job, what it lacks, and whether a model's weights fit; `--tune` times
the model's matrix products on its GPU; `--card` tells the same of a card of the table, without the machine."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from batchspec.checkpoint.config_values import read_json
from batchspec.checkpoint.files import stored_tensors
from batchspec.checkpoint.hub import find_model
from batchspec.commands.card_text import about, launches, paths
from batchspec.console import terminal
from batchspec.console.arguments import ArgumentParser
from batchspec.draft.block_head import dummy_block_spec, open_block
from batchspec.draft.block_tensors import products as block_products
from batchspec.draft.head import products as head_products
from batchspec.draft.mtp_head import products as mtp_products
from batchspec.draft.spec import DEFAULT_DRAFT_VOCAB
from batchspec.draft.weights import drafts_blocks, dummy_spec, has_usual_heads, open_head
from batchspec.errors import CheckpointError, ConfigError
from batchspec.kernels.common.card import assumed, card_of
from batchspec.model.dtype import dtype_name, resolve_dtype
from batchspec.model.families.shapes import DRAFT_VOCAB, SHAPES, shape_spec
from batchspec.model.layers.attention.flash import SHORT, flashinfer
from batchspec.model.products import products
from batchspec.model.spec import ModelSpec, load_spec
from batchspec.model.vision.registry import load_vision
from batchspec.packing.device_memory import free_memory
from batchspec.tuning.cards import KnownCard, check_card, known_card
from batchspec.tuning.table import Product, save, tune, tuned_products
from batchspec.version import __version__

_OF_IMAGES = {
    "PIL": "none is read: Pillow is missing; pip install 'pillow>=11'",
    "pypdfium2": "no PDF is read: pypdfium2 is missing; pip install 'pypdfium2>=5,<6'",
}
"""Modules that images need, as in pyproject.toml's extras `images` and `pdf`, and what it costs that one is missing."""


def main(argv: list[str]) -> int:
    """Print the findings, or tune. Raises ConfigError for --tune without a GPU and for an unknown or unsupported card,
    CheckpointError if MODEL is not a model."""
    args = _parse(argv)
    if args.card is not None:
        terminal.show("\n".join(_report_card(args, known_card(args.card))))
        return 0
    spec = None if args.model is None else _spec(args.model)
    wanted = [] if spec is None else _products(args, spec)
    if not torch.cuda.is_available():
        if args.tune:
            raise ConfigError("doctor --tune times matrix products on a GPU, and torch sees none on this machine; leave it out")
        cpu = torch.device("cpu")
        free_gb = free_memory(cpu) / 1e9
        terminal.show(
            f"no GPU that torch {torch.__version__} sees: jobs run on the CPU, which has {free_gb:,.1f} GB of memory free"
        )
        if spec is not None:
            terminal.show(f"model {args.model}: {_size(spec, cpu)}")
            for line in _images(args.model):
                terminal.show(f"images: {line}")
        return 0
    device = torch.device("cuda", torch.cuda.current_device())
    if args.tune:
        path = save(tune(wanted, device), torch.cuda.get_device_name(device), args.out)
        terminal.show(f"{len(wanted)} products written to {path}")
    else:
        terminal.show("\n".join(_report(args, device, spec, wanted)))
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(prog="batchspec doctor", description=__doc__)
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help=f"folder, hub id, config.json or one of {', '.join(SHAPES)} (with a head)")
    add("--draft-path", metavar="HEAD", help="folder or hub id of an EAGLE-3, DFlash or DSpark head for MODEL")
    add("--tune", action="store_true", help="time the matrix products of MODEL and HEAD, about 10 s each; needs an idle GPU")
    add("--card", metavar="NAME", help="tell of this card instead, as A100-80GB or L40S; a wrong name lists all")
    add("--out", type=Path, metavar="FILE", help="--tune: table to add the results to, instead of the one in your cache folder")
    args = parser.parse_args(argv)
    for given, name in ((args.tune, "--tune"), (args.draft_path, "--draft-path")):
        if given and args.model is None:
            raise ConfigError(f"doctor {name} needs MODEL: a folder, a hub id, a config.json or one of {', '.join(SHAPES)}")
    if args.card is not None and args.tune:
        raise ConfigError(f"doctor --tune times products on this machine's GPU, not on a {args.card}; remove --card or --tune")
    if args.out and not args.tune:
        raise ConfigError(f"doctor --out {args.out} is only written by --tune; add --tune or remove --out")
    return args


def versions() -> dict[str, str]:
    """Versions of the installed packages that a GPU's speed depends on."""
    found = {"batchspec": __version__, "torch": torch.__version__}
    for package in ("triton", "flashinfer-python"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _products(args: argparse.Namespace, spec: ModelSpec) -> list[Product]:
    if torch.cuda.is_available():
        spec = spec.on(torch.device("cuda", torch.cuda.current_device()), torch.bfloat16)
    of_mtp = [] if spec.mtp is None else mtp_products(spec.mtp)
    return list(dict.fromkeys([*products(spec), *_of_head(args, spec), *of_mtp]))


def _of_head(args: argparse.Namespace, spec: ModelSpec) -> list[Product]:
    """Of the given head; of a shape, of typical heads: EAGLE-3, DSpark, DFlash2."""
    if args.draft_path:
        files = find_model(args.draft_path, key="--draft-path")
        if drafts_blocks(stored_tensors(files)):
            return block_products(open_block(files, spec))
        return head_products(open_head(files, spec))
    if args.model not in SHAPES or not has_usual_heads(spec):
        return []
    vocab = DRAFT_VOCAB.get(args.model, DEFAULT_DRAFT_VOCAB)
    blocks = (dummy_block_spec(spec, draft_vocab_size=vocab, dflash2=dflash2) for dflash2 in (False, True))
    return [*head_products(dummy_spec(spec, draft_vocab_size=vocab)), *(each for one in blocks for each in block_products(one))]


def _spec(model: str) -> ModelSpec:
    a_shape = model in SHAPES or Path(model).is_file()
    return shape_spec(model) if a_shape else load_spec(find_model(model, key="MODEL").folder)


def _report_card(args: argparse.Namespace, known: KnownCard) -> list[str]:
    check_card(known.card)
    lines = [f"card      {about(known)}", *(f"{label:<9} {line}" for label, line in paths(known))]
    if args.model is not None:
        with assumed(known.card):
            size = _size(_spec(args.model), torch.device("cuda"))
        lines.append(f"model     {args.model}: {size}; `batchspec plan --card {known.card.name}` tells slots and times")
    return [*lines, "computed, not measured"]


def _size(spec: ModelSpec, device: torch.device) -> str:
    """What the weights take on a device, in the dtype in which a job would compute, and what that leaves of its free memory."""
    dtype = resolve_dtype("auto", spec, device)
    spec = spec.on(device, dtype)
    name = dtype_name(dtype)
    kept = f" ({spec.formats.kept}, the rest {name})" if spec.formats.kept else f" in {name}"
    weights, free = spec.weight_bytes(dtype), free_memory(device)
    gb = f"{abs(free - weights) / 1e9:,.1f} GB"
    left = f"{gb} are left" if weights < free else f"{gb} more than the memory that is free"
    return f"weights of {weights / 1e9:,.2f} GB{kept}; {left}"


def _report(args: argparse.Namespace, device: torch.device, spec: ModelSpec | None, wanted: list[Product]) -> list[str]:
    card, tuned = card_of(device), tuned_products(device)
    lines = [
        f"card      {card.name}, compute capability {card.capability[0]}.{card.capability[1]}, "
        f"{free_memory(device) / 1e9:,.1f} GB free of {card.memory_bytes / 1e9:,.1f} GB",
        f"versions  python {platform.python_version()}, " + ", ".join(f"{name} {found}" for name, found in versions().items()),
        f"prefill   attention by torch up to {SHORT:,} keys per row, by FlashInfer above"
        if flashinfer() is not None
        else f"prefill   attention by torch, slower above {SHORT:,} keys: FlashInfer is missing; "
        "pip install 'flashinfer-python>=0.6.13'",
        f"products  {len(tuned)} tuned for this card"
        if tuned
        else "products  none tuned for this card: all by cuBLAS, none fused; batchspec doctor --tune MODEL times them",
    ]
    if not card.overlaps_launches:
        lines.append(f"launches  {launches(card)}")
    if spec is not None:
        missing = [f"{op} {rows}x{k}" for op, rows, k in wanted if (op, rows, k) not in tuned]
        how = "by cuBLAS, in four bits by estimate" if any(name.startswith("four_bit") for name in missing) else "by cuBLAS"
        rest = f"; {how}: {', '.join(missing)}; batchspec doctor --tune times them" if missing else ""
        size = _size(spec, device)
        lines.append(f"model     {args.model}: {size}; {len(wanted) - len(missing)} of {len(wanted)} products tuned{rest}")
        lines += [f"images    {one}" for one in _images(args.model)]
    return lines


def _images(model: str) -> Iterator[str]:
    """Whether this machine can read images for a model, and what that lacks; nothing about a shape or a model of text."""
    if model in SHAPES or Path(model).is_file():
        return
    folder = find_model(model, key="MODEL").folder
    config = read_json(folder / "config.json")
    if "vision_config" not in config:
        return
    try:
        load_vision(folder)
    except CheckpointError as error:
        yield f"not read: {error}"
        return
    missing = [said for module, said in _OF_IMAGES.items() if find_spec(module) is None]
    yield "; ".join(missing) or "those of rows and pages of PDFs are read"
