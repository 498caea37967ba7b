"""Writes jobs over pages or photos for models with dummy weights, and prints the commands that run and plan them.

    python jobs/benchmarks/image_jobs.py DIR --shape qwen3-vl-8b --pages 400
    python jobs/benchmarks/image_jobs.py DIR --shape qwen3.5-9b --photos 4000

Pages are JPEG images of A4 at 200 dpi, 1654 x 2339 pixels, with random text; the model reads 1216 x 1728 of them, 2,052 tokens.
Photos are JPEG images of 448 x 448 pixels, 196 tokens. DIR gets `model` (config.json, preprocessor_config.json, a tokenizer of
the shape's size, which other engines read too) and `in.parquet` (columns id, prompt, image). Every answer has --gen tokens.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from batchspec.bench.image_preparation import page

MOST_PIXELS, PAGE_TOKENS, PHOTO_TOKENS, PHOTO = 2_129_920, 2052, 196, 448
GEN = {"pages": 512, "photos": 64}
PROMPT = {"pages": "Write down the text of this page.", "photos": "Describe this photo."}
ROOM = 96
"""Tokens of a prompt besides those of its image at most."""
GROUP = 200
"""Rows of a Parquet row group."""
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT: dict[str, Any] = {
    "model_type": "qwen3_vl_text", "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 262144,
    "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "attention_bias": False, "rope_theta": 5e6,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
}
_VISION: dict[str, Any] = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "hidden_act": "gelu_pytorch_tanh",
    "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304,
}
_QWEN3_VL: dict[str, Any] = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl"}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-vl-8b": {
        **_QWEN3_VL, "tie_word_embeddings": False,
        "text_config": {
            **_TEXT, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        },
        "vision_config": {
            **_VISION, "model_type": "qwen3_vl", "out_hidden_size": 4096, "deepstack_visual_indexes": [8, 16, 24],
        },
    },
    "qwen3-vl-2b": {
        **_QWEN3_VL, "tie_word_embeddings": True,
        "text_config": {
            **_TEXT, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
            "tie_word_embeddings": True,
        },
        "vision_config": {
            **_VISION, "model_type": "qwen3_vl", "depth": 24, "hidden_size": 1024, "intermediate_size": 4096,
            "out_hidden_size": 2048, "deepstack_visual_indexes": [5, 11, 17],
        },
    },
    "qwen3.5-9b": {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_5_text", "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 262144,
            "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
            "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "attention_bias": False,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "mtp_num_hidden_layers": 0, "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {**_VISION, "model_type": "qwen3_5", "out_hidden_size": 4096},
    },
}
SHAPES["tiny"] = {
    **_QWEN3_VL, "tie_word_embeddings": True,
    "text_config": {
        **_TEXT, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": True,
    },
    "vision_config": {
        **_VISION, "model_type": "qwen3_vl", "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
        "out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    },
}
"""config.json by name, without the ids of tokens. tiny: to try a job on a CPU."""


def photo(seed: int) -> bytes:
    """A JPEG of smooth colours and noise."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((PHOTO, PHOTO), Image.Resampling.BICUBIC), np.int16)
    noisy = np.clip(smooth + rng.integers(-12, 13, smooth.shape, dtype=np.int16), 0, 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(noisy).save(out, "JPEG", quality=90)
    return out.getvalue()


def write_model(folder: Path, shape: str) -> Path:
    """The folder of a model of this shape, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES[shape]
    vocab = config["text_config"]["vocab_size"]
    first = vocab - vocab % 64 - 64  # the special tokens are the last ones but for some that no token has
    ids = {text: first + i for i, text in enumerate((*SPECIAL, *MARKS))}
    named = {"vision_start_token_id": 0, "vision_end_token_id": 1, "image_token_id": 3, "video_token_id": 4}
    tokens = {key: ids[MARKS[i]] for key, i in named.items()} | {"eos_token_id": ids["<|im_end|>"]}
    processor = {
        "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
        "size": {"shortest_edge": 65536, "longest_edge": MOST_PIXELS}, "processor_class": "Qwen3VLProcessor",
    }
    files: dict[str, Any] = {
        "config.json": config | tokens | {"dtype": "bfloat16"},
        "preprocessor_config.json": {**processor, "image_processor_type": "Qwen2VLImageProcessorFast"},
        "video_preprocessor_config.json": {**processor, "video_processor_type": "Qwen3VLVideoProcessor"},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[2], "pad_token": SPECIAL[0],
            "image_token": MARKS[3], "video_token": MARKS[4], "vision_start_token": MARKS[0], "vision_end_token": MARKS[1],
        },
        "tokenizer.json": _tokenizer(vocab, ids),
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
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


def images_of(kind: str, count: int, processes: int | None) -> Iterator[bytes]:
    """Different images, in order."""
    make: Callable[[int], bytes] = page if kind == "pages" else photo
    with ProcessPoolExecutor(processes) as pool:
        yield from pool.map(make, range(count), chunksize=8)


def write_input(path: Path, kind: str, count: int, processes: int | None) -> int:
    """in.parquet. Returns the bytes of all images."""
    schema = pa.schema([("id", pa.string()), ("prompt", pa.string()), ("image", pa.binary())])
    found, size = list[bytes](), 0
    with pq.ParquetWriter(path, schema, compression="none") as writer:
        for number, image in enumerate(images_of(kind, count, processes), 1):
            found.append(image)
            size += len(image)
            if len(found) == GROUP or number == count:
                ids = [f"{kind}-{i:05d}" for i in range(number - len(found), number)]
                columns = [pa.array(ids), pa.array([PROMPT[kind]] * len(found)), pa.array(found, pa.binary())]
                writer.write_table(pa.table(columns, schema=schema))
                found = []
    return size


def words_of(folder: Path, kind: str, gen: int) -> list[str]:
    """The arguments of `batchspec run` and `batchspec plan`."""
    longest = (PAGE_TOKENS if kind == "pages" else PHOTO_TOKENS) + ROOM + gen
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
    write_model(given.folder / "model", given.shape)
    size = write_input(given.folder / "in.parquet", kind, count, given.processes)
    print(f"{count} {kind} of {size / count / 1e3:,.0f} kB", flush=True)
    words = " ".join(words_of(given.folder, kind, given.gen or GEN[kind]))
    print(f"python -m batchspec.run {words}\nbatchspec plan {words}")


if __name__ == "__main__":
    main()
