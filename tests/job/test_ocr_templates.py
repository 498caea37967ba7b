"""Jobs of OCR models with chat templates of the form that their files have: prompts as the processor of transformers makes them,
and the same answers with every drafter."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import (
    AutoTokenizer,
    Glm46VImageProcessorPil,
    Glm46VProcessor,
    LightOnOcrProcessor,
    PixtralImageProcessorPil,
)

from tests.helpers.image_models import MARKS, make_image_model, picture
from tests.job.test_image_jobs import Rows, done, user

A, B = picture(30, 50, 1), picture(41, 23, 2)
TEMPLATES = {
    "lighton_ocr": (
        "<|im_start|>system<|im_end|>\n{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] %}"
        "{% if item['type'] == 'image' %}<|image_pad|>{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}"
        "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "glm_ocr": (
        "[gMASK]<sop>\n{%- macro visible(content) -%}{%- if content is string -%}{{- content }}{%- else -%}"
        "{%- for item in content -%}{%- if item is mapping and item.type == 'text' -%}{{- item.text }}"
        "{%- elif item is mapping and (item.type == 'image' or 'image' in item) -%}"
        "<|begin_of_image|><|image|><|end_of_image|>{%- endif -%}{%- endfor -%}{%- endif -%}{%- endmacro -%}"
        "{%- for m in messages %}{%- if m.role == 'user' -%}<|user|>\n{{ visible(m.content) }}"
        "{{- '/nothink' if (enable_thinking is defined and not enable_thinking) else '' -}}"
        "{%- elif m.role == 'assistant' -%}<|assistant|>\n{{ visible(m.content) }}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|assistant|>\n{%- endif -%}"
    ),
}
"""Images alone are enough for LightOnOCR; GLM-OCR is asked in a few words."""
GLM_MARKS = ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>")
ROWS: Rows = [
    {"messages": user("<image>"), "images": [A]}, {"messages": user("<image>Text Recognition:"), "images": [B]},
    {"messages": user([{"type": "image"}, {"type": "image"}]), "images": [A, B]},
    {"messages": user("no picture"), "images": []},
    {"messages": [*user("<image>"), {"role": "assistant", "content": "ab"}, *user("and <image>?")], "images": [B, A]},
]


@pytest.fixture(params=TEMPLATES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def made(folder: Path, kind: str, **more: Any) -> Path:
    """A model whose tokenizer has the marks and the template of published files."""
    make_image_model(folder, kind, seed=3, **more)
    tokenizer, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if kind == "glm_ocr":
        text = tokenizer.read_text()
        for old, new in zip(MARKS, GLM_MARKS, strict=True):
            text = text.replace(old, new)
        tokenizer.write_text(text)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATES[kind]}))
    return folder


def processor_of(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    values = json.loads((folder / "preprocessor_config.json").read_text()) | {"image_processor_type": None}
    auto: Any = AutoTokenizer
    if kind == "lighton_ocr":
        names = dict(zip(("image_token", "image_break_token", "image_end_token"), (MARKS[1], MARKS[0], MARKS[2]), strict=True))
        tokenizer = auto.from_pretrained(folder, extra_special_tokens=names)
        return LightOnOcrProcessor(
            PixtralImageProcessorPil(**values), tokenizer, patch_size=4, spatial_merge_size=2, chat_template=TEMPLATES[kind]
        )
    own: Any = Glm46VProcessor
    monkeypatch.setattr(own, "check_argument_for_proper_class", lambda *_: None)  # it looks for a class of videos
    return own(Glm46VImageProcessorPil(**values), auto.from_pretrained(folder), None, chat_template=TEMPLATES[kind])


def chat_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """With parts, as the processor reads it."""
    left, found = iter(row["images"]), []
    for turn in row["messages"]:
        parts: list[dict[str, Any]] = []
        content = turn["content"] if isinstance(turn["content"], list) else [{"type": "text", "text": turn["content"]}]
        for part in content:
            if part["type"] == "image":
                parts.append({"type": "image", "image": Image.open(io.BytesIO(next(left)))})
                continue
            for number, text in enumerate(part["text"].split("<image>")):
                parts += [{"type": "image", "image": Image.open(io.BytesIO(next(left)))}] if number else []
                parts += [{"type": "text", "text": text}] if text else []
        found.append({**turn, "content": parts})
    return found


@pytest.mark.second
def test_prompts_are_those_of_the_processor_of_transformers(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(tmp_path / kind, kind)
    kwargs = {"enable_thinking": False} if kind == "glm_ocr" else {}
    words = ["input.template_kwargs={enable_thinking: false}"] if kwargs else []
    rows = [{**row, "messages": json.dumps(row["messages"])} for row in ROWS]
    found = done(model, tmp_path, rows, "input.columns={images: images}", "decode.max_new_tokens=4", *words)
    theirs = processor_of(model, kind, monkeypatch)
    for row, out in zip(ROWS, found, strict=True):
        assert out["error"] is None
        expected = theirs.apply_chat_template(
            chat_of(row), add_generation_prompt=True, tokenize=True, return_dict=True, processor_kwargs={}, **kwargs
        )
        (ids,) = torch.as_tensor(expected["input_ids"]).tolist()
        assert out["prompt_ids"] == ids


@pytest.mark.second
def test_answers_are_the_same_with_every_drafter_in_fp64(kind: str, tmp_path: Path) -> None:
    """With the MTP layer of GLM-OCR too, whose copies of the model's matrices are not read."""
    has_mtp = kind == "glm_ocr"
    model = made(tmp_path / kind, kind, dtype=torch.float64, mtp=has_mtp)
    rows = [{**row, "messages": json.dumps(row["messages"])} for row in ROWS]
    answers = {}
    for draft in ("none", "lookup", *(["mtp"] if has_mtp else [])):
        keys = (f"draft={draft}", "model.dtype=float64", "decode.max_new_tokens=32", "output.overwrite=true")
        found = done(model, tmp_path, rows, "input.columns={images: images}", *keys)
        assert [row["error"] for row in found] == [None] * len(ROWS)
        answers[draft] = [row["token_ids"] for row in found]
        drafted = sum(row["spec_decode"]["num_draft_tokens"] for row in found if row["spec_decode"])
        assert drafted > 100 if draft == "mtp" else (drafted > 0) == (draft == "lookup")
    assert all(one == answers["none"] for one in answers.values())
    assert len({token for answer in answers["none"] for token in answer}) > 10
