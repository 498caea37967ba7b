"""The files of a checkpoint, and the tensors of its weight files from the safetensors headers alone, without reading weights.

Format: 8 bytes little-endian length of the header; the header, JSON: tensor -> dtype, shape, data_offsets; the data.
Source: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from batchspec.checkpoint.config_values import read_json, readable, shown
from batchspec.console.text import cut, quoted
from batchspec.errors import CheckpointError
from batchspec.process.local_files import fault_of, open_regular

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_OTHERS = re.compile(r"(pytorch_model.*\.bin|(adapter_model|consolidated).*\.\w+|.*\.(pth|pt|gguf|ckpt|msgpack|h5))")
_SHARD = re.compile(r"[\w.-]+\.safetensors")
_NAME_CHARS = 160
_REQUESTS = 8


class Entry(NamedTuple):
    """Some rows of the matrix of one expert in a tensor [E, rows, k]."""

    expert: int
    rows: slice


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a weight file."""

    name: str
    """Its name in the file."""
    dtype: str
    """F64, F32, F16, BF16, I64, BOOL ...: the names of safetensors."""
    shape: tuple[int, ...]
    file: str
    start: int
    """The data are bytes [start, end) of the file."""
    end: int
    entry: Entry | None = None
    """The part of the file's tensor that this is; None: all of it. `start` and `end` are those of the file's tensor."""


class ModelFiles(Protocol):
    """The files of a model or head: a local folder, or a repository of the hub whose weights may not be fetched yet."""

    @property
    def folder(self) -> Path:
        """Holds configuration, tokenizer and templates, and after `fetch` the weights too."""

    @property
    def where(self) -> str:
        """Name for messages: the folder, or the hub id."""

    def names(self) -> Collection[str]:
        """Names of all files, including the weights."""

    def read(self, name: str, start: int, end: int) -> tuple[bytes, int]:
        """Bytes [start, end) of a file, fewer if it ends earlier, and the size of the file. Raises CheckpointError."""

    def fetch(self) -> None:
        """Download the weights into the folder. Raises CheckpointError."""


@dataclass(frozen=True, slots=True)
class LocalFiles:
    folder: Path

    @property
    def where(self) -> str:
        return shown(self.folder)

    def names(self) -> Collection[str]:
        try:
            return [path.name for path in self.folder.iterdir()]
        except OSError as error:
            refusal = CheckpointError(f"{self.where}: cannot be read ({error.strerror or error}); give a model folder")
            raise fault_of(error, self.where, refusal) from None

    def read(self, name: str, start: int, end: int) -> tuple[bytes, int]:
        path = self.folder / name
        with readable(path), open_regular(path) as file:
            file.seek(start)
            return file.read(end - start), path.stat().st_size

    def fetch(self) -> None:
        """Nothing to do: local weights are already in the folder."""


def weight_names(files: ModelFiles) -> tuple[str, ...]:
    """Names of the weight files: those listed in the index, or model.safetensors.

    Raises CheckpointError, in one line, if there are none, some are missing, or they are in another format.
    """
    present = set(files.names())
    if INDEX in present:
        weight_map = read_json(files.folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{files.where}/{INDEX}: the index names no weight files; download it again")
        wrong = [name for name in weight_map.values() if not (isinstance(name, str) and _SHARD.fullmatch(name))]
        if wrong:
            name = str(wrong[0])[:99]
            raise CheckpointError(f"{files.where}/{INDEX}: {name!r} is not a safetensors file next to it; correct it")
        names = sorted(set(weight_map.values()))
        absent = [name for name in names if name not in present]
        if absent:
            raise CheckpointError(
                f"{files.where}: {len(absent)} of {len(names)} weight files missing: {listed(absent)}; download again"
            )
        if SINGLE in present and SINGLE not in names:
            raise CheckpointError(
                f"{files.where}: has {SINGLE}, and {INDEX} names other files; programs differ in which they load: delete one"
            )
        return tuple(names)
    if SINGLE in present:
        return (SINGLE,)
    if others := sorted(name for name in present if _OTHERS.fullmatch(name)):
        raise CheckpointError(
            f"{files.where}: only {listed(others)}: safetensors only ({SINGLE}, or {INDEX} with its files); save the model again "
            "as safetensors"
        )
    raise CheckpointError(f"{files.where}: no weights: neither {SINGLE} nor {INDEX}; download the model, or correct its path")


def stored_tensors(files: ModelFiles) -> dict[str, StoredTensor]:
    """Every tensor of the weight files by name, from their headers.

    Raises CheckpointError, in one line, like `weight_names`, and for a broken file or a tensor that is in two files.
    """
    names = weight_names(files)
    with ThreadPoolExecutor(min(_REQUESTS, len(names))) as pool:
        headers = list(pool.map(lambda name: file_tensors(files, name), names))
    found: dict[str, StoredTensor] = {}
    for name, header in zip(names, headers, strict=True):
        if twice := sorted(found.keys() & header.keys()):
            raise CheckpointError(f"{files.where}: {listed(twice[:1])} is in {name} and in another file too; download it again")
        found |= header
    return found


def file_tensors(files: ModelFiles, name: str) -> dict[str, StoredTensor]:
    """The tensors of one file by its header. Raises CheckpointError for another format, or a length other than the header's."""
    start, size = files.read(name, 0, 8)

    def broken(problem: str) -> CheckpointError:
        return CheckpointError(f"{files.where}/{name}: cannot be read as safetensors ({problem}); download the file again")

    if start.startswith(b"version "):
        raise CheckpointError(
            f"{files.where}/{name}: a pointer of Git LFS, not the weights; run `git lfs pull` there, or download the model again"
        )
    length = int.from_bytes(start, "little")
    if len(start) < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise broken(f"{size:,} bytes, and the first 8 are not the length of a header")
    content, _ = files.read(name, 8, 8 + length)
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):
        raise broken("its header is not JSON") from None
    if not isinstance(values, dict):
        raise broken("its header is not an object")
    found = {}
    for tensor, value in values.items():
        if tensor != "__metadata__":
            if not _is_entry(value):
                raise broken(f"no dtype, shape and offsets of {quoted(tensor)} in its header")
            first, last = value["data_offsets"]
            found[tensor] = StoredTensor(
                    tensor, value["dtype"], tuple(value["shape"]), name, 8 + length + first, 8 + length + last
                )
    whole = max((stored.end for stored in found.values()), default=8 + length)
    if size != whole:
        raise broken(f"{'cut off' if size < whole else 'too long'}: by its header it has {whole:,} bytes, but it has {size:,}")
    return found


def _is_entry(value: Any) -> bool:
    """Whether this is a valid header entry of a tensor, with as many bytes as dtype and shape require."""
    if not isinstance(value, dict):
        return False
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not (isinstance(dtype, str) and isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2):
        return False
    if not all(type(item) is int and 0 <= item < 2**60 for item in [*shape, *offsets]):
        return False
    return offsets[0] <= offsets[1] and (dtype not in _SIZES or offsets[1] - offsets[0] == math.prod(shape) * _SIZES[dtype])


def listed(names: Collection[str], most: int = 2) -> str:
    """For messages: the first `most` names and the number of the others."""
    first = ", ".join(cut(name, _NAME_CHARS) for name in list(names)[:most])
    return first if len(names) <= most else f"{first} and {len(names) - most:,} more"
