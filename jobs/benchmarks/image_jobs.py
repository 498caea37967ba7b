"""Writes jobs over pages or photos for models with dummy weights, and prints the commands that run and plan them.

    python jobs/benchmarks/image_jobs.py DIR --shape qwen3-vl-8b --pages 400
    python jobs/benchmarks/image_jobs.py DIR --shape qwen2.5-vl-7b --pages 300
    python jobs/benchmarks/image_jobs.py DIR --shape qwen3.5-9b --photos 4000
    python jobs/benchmarks/image_jobs.py DIR --shape gemma4-26b-a4b --photos 4000 --gen 128

Pages are JPEG images of A4 at 200 dpi, 1654 x 2339 pixels, with random text. Qwen3-VL and Qwen3.5 read 1216 x 1728 of them,
qwen2.5-vl-7b, with smaller patches, 1064 x 1512: 2,052 tokens each. Photos are JPEG images of 448 x 448 pixels, 196 tokens, of
qwen2.5-vl-7b 256. Those of gemma4-26b-a4b have 640 x 448 pixels, which become 280 tokens, its usual limit, between two
others. DIR gets `model` (config.json, files of processors, a chat template and a tokenizer of the shape's size, which
other engines read too) and `in.parquet` (columns id, prompt, image). Every answer has --gen tokens.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from image_shapes import SHAPES, folder_files
from PIL import Image

from batchspec.bench.image_preparation import HEIGHT, WIDTH, page
from batchspec.model.vision.registry import load_vision

GEN = {"pages": 512, "photos": 64}
PROMPT = {"pages": "Write down the text of this page.", "photos": "Describe this photo."}
ROOM = 96
"""Tokens of a prompt besides those of its image at most."""
GROUP = 200
"""Rows of a Parquet row group."""


def photo(seed: int, height: int, width: int) -> bytes:
    """A JPEG of smooth colours and noise."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    noisy = np.clip(smooth + rng.integers(-12, 13, smooth.shape, dtype=np.int16), 0, 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(noisy).save(out, "JPEG", quality=90)
    return out.getvalue()


def write_model(folder: Path, shape: str) -> Path:
    """The folder of a model of this shape, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config, own = SHAPES[shape], folder_files(shape)
    vocab = config["text_config"]["vocab_size"]
    first = vocab - vocab % 64 - 64  # the special tokens are the last ones but for some that no token has
    ids = {text: first + i for i, text in enumerate(own.special)}
    files: dict[str, Any] = {
        "config.json": config | {key: ids[token] for key, token in own.ids.items()} | {"dtype": "bfloat16"},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **own.names},
        "tokenizer.json": _tokenizer(vocab, ids),
        **own.files,
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))
    (folder / "chat_template.jinja").write_text(own.template)
    return folder


def _tokenizer(vocab: int, special: dict[str, int]) -> dict[str, Any]:
    """tokenizer.json: a token for each byte, then words that no text becomes, so that every output is a text."""
    from tokenizers import pre_tokenizers

    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {name: i for i, name in enumerate(bytes_)}
    words |= {f"w{i}": i for i in range(len(bytes_), vocab) if i not in special.values()} | special
    added = [
        {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for text, i in special.items()
    ]
    levels = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model: dict[str, Any] = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": words, "merges": [],
    }
    empty = {"truncation": None, "padding": None, "normalizer": None, "post_processor": None}
    return {"version": "1.0", **empty, "added_tokens": added, "pre_tokenizer": levels, "decoder": levels, "model": model}


def images_of(kind: str, count: int, size: tuple[int, int], processes: int | None) -> Iterator[bytes]:
    """Different images, in order. size: height and width of a photo."""
    make: Callable[[int], bytes] = page if kind == "pages" else partial(photo, height=size[0], width=size[1])
    with ProcessPoolExecutor(processes) as pool:
        yield from pool.map(make, range(count), chunksize=8)


def write_input(path: Path, images: Iterable[bytes], kind: str, count: int) -> int:
    """in.parquet. Returns the bytes of all images."""
    schema = pa.schema([("id", pa.string()), ("prompt", pa.string()), ("image", pa.binary())])
    found, size = list[bytes](), 0
    with pq.ParquetWriter(path, schema, compression="none") as writer:
        for number, image in enumerate(images, 1):
            found.append(image)
            size += len(image)
            if len(found) == GROUP or number == count:
                ids = [f"{kind}-{i:05d}" for i in range(number - len(found), number)]
                columns = [pa.array(ids), pa.array([PROMPT[kind]] * len(found)), pa.array(found, pa.binary())]
                writer.write_table(pa.table(columns, schema=schema))
                found = []
    return size


def image_tokens(folder: Path, size: tuple[int, int]) -> int:
    """Number of tokens of an image of this height and width in a prompt, with those that begin and end it."""
    processor = load_vision(folder).processor
    return len(processor.tokens(*processor.grid(processor.fit(*size)))) + sum(map(len, processor.around))


def words_of(folder: Path, tokens: int, gen: int) -> list[str]:
    """The arguments of `batchspec run` and `batchspec plan`. tokens: of an image."""
    longest = tokens + ROOM + gen
    return [
        f"model.path={folder}/model", "model.load_format=dummy", f"model.max_len={longest}", f"input.path={folder}/in.parquet",
        "input.chat=true", "'input.columns={images: image}'", "draft=none", "decode.ignore_eos=true",
        f"decode.max_new_tokens={gen}", "output.overwrite=true", f"output.dir={folder}/out",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-vl-8b")
    kinds = parser.add_mutually_exclusive_group(required=True)
    kinds.add_argument("--pages", type=int, help="rows of a page each")
    kinds.add_argument("--photos", type=int, help="rows of a photo each")
    parser.add_argument("--gen", type=int, help="tokens of each answer; default: 512 of pages, 64 of photos")
    parser.add_argument("--processes", type=int, help="that draw images; default: one for each CPU")
    given = parser.parse_args(arguments)
    kind, count = ("pages", given.pages) if given.pages else ("photos", given.photos)
    model = write_model(given.folder / "model", given.shape)
    size = (HEIGHT, WIDTH) if kind == "pages" else folder_files(given.shape).photo
    images = images_of(kind, count, size, given.processes)
    written, tokens = write_input(given.folder / "in.parquet", images, kind, count), image_tokens(model, size)
    print(f"{count} {kind} of {written / count / 1e3:,.0f} kB and {tokens:,} tokens", flush=True)
    words = " ".join(words_of(given.folder, tokens, given.gen or GEN[kind]))
    print(f"python -m batchspec.run {words}\nbatchspec plan {words}")


if __name__ == "__main__":
    main()
