"""The model that learns to read (jobs/examples/reader): its lines, what it computes, its training, and jobs over pictures."""

from __future__ import annotations

import importlib
import shutil
from collections import deque
from multiprocessing import active_children
from pathlib import Path
from random import Random
from typing import Any

import matplotlib
import numpy as np
import polars as pl
import pytest
import torch
from PIL import Image

from tests.helpers.mtp_definition import Mtp

FOLDER = Path(__file__).parents[2] / "jobs/examples/reader"
FONTS, UNSEEN = ("DejaVuSans.ttf", "DejaVuSerif.ttf", "DejaVuSansMono.ttf"), "DejaVuSansMono"
SHAPE: dict[str, Any] = {
    "vision_depth": 2, "vision_size": 48, "vision_heads": 2, "vision_inner": 56, "layers": 2, "size": 64, "inner": 80, "heads": 2,
    "kv_heads": 1, "head_dim": 48, "sections": (4, 5, 3), "key_heads": 2, "key_dim": 12, "value_dim": 20, "positions": 25,
}
TEXT = "Hello, World 12"


def load(*names: str) -> list[Any]:
    """The modules of the folder. They import each other by their bare names, as a script imports files of its folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        return [importlib.import_module(name) for name in names]


lines, drawn, model, vision, folder, weights, feed, train, check = load(
    "reader_lines", "reader_pictures", "reader_model", "reader_vision", "reader_folder", "reader_weights", "reader_feed",
    "train_reader", "check_reader",
)


@pytest.fixture(scope="module")
def fonts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found, own = tmp_path_factory.mktemp("fonts"), Path(matplotlib.get_data_path()) / "fonts/ttf"
    for name in FONTS:
        shutil.copy(own / name, found)
    return found


def reader(**more: Any) -> Any:
    """A random model whose biases and norms are not 0 and 1."""
    torch.manual_seed(0)
    made = model.Reader(vision.Shape(**SHAPE, **more))
    with torch.no_grad():
        for own in made.parameters():
            own.add_(0.1 * torch.randn_like(own) if own.ndim == 1 else 0.0)
            own.copy_(own.bfloat16())  # what a file holds
    return made


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    made = reader()
    return made, folder.save(tmp_path_factory.mktemp("readers") / "reader", made, dict(made.named_parameters()))


def test_random_strings_leave_out_what_fonts_draw_alike_and_lines_have_their_lengths() -> None:
    assert not set("Il|O0") & set(lines.MIXED)
    rng = Random(0)
    for length in range(1, lines.MOST + 1):
        text = lines.some_text(rng, length)
        assert length - 1 <= len(text) <= length
        assert text.isascii()
        assert text == text.strip()


def test_edges_of_characters_enclose_their_ink(fonts: Path) -> None:
    seen, unseen = lines.find_fonts(fonts, UNSEEN)
    assert [Path(path).name for path in (*seen, *unseen)] == [*FONTS[:2], FONTS[2]]
    found = lines.some_lines(Random(1), seen, 20, 3, 12, 64, 320)
    for mask, text, edges in zip(found.masks, found.texts, found.edges, strict=True):
        assert 1 <= len(text) <= 12
        inked = np.flatnonzero(mask.any(0))
        assert edges[0] - 3 <= inked[0]
        assert inked[-1] <= edges[len(text)] + 3
        assert (np.diff(edges[: len(text) + 1]) > 0).all()
        assert (edges[len(text) + 1 :] == -1).all()
        last = mask[:, edges[len(text) - 1] : edges[len(text)]]
        assert last.any() or text[-1] == " "
    with pytest.raises(ValueError, match="Nothing must be one"):
        lines.find_fonts(fonts, "Nothing")


def test_lines_to_test_are_not_cut_and_fit_their_pictures(fonts: Path) -> None:
    groups = lines.lines_to_test(Random(2), lines.find_fonts(fonts, UNSEEN)[0], 40, batch=8)
    assert sum(len(group.masks) for group in groups) == 40
    assert min(len(text) for group in groups for text in group.texts) >= 9
    for group in groups:
        assert group.masks.shape[2] <= lines.WIDEST
        assert group.edges.max() <= group.masks.shape[2]


def test_pictures_keep_their_text_in_the_frame_and_are_black_on_white_at_strength_0() -> None:
    mask = torch.zeros(3, 48, 96, dtype=torch.uint8)
    mask[:, 20:28, 8:88] = 255
    room = torch.tensor([0.0, 0.05, 0.1])
    plain = drawn.pictures(mask, room, 0.0)
    assert (plain[..., 0] == 255 - mask).float().mean() > 0.97  # the warp may round at edges
    noisy = drawn.pictures(mask, room, 1.0, torch.Generator().manual_seed(0))
    assert noisy.shape == (3, 48, 96, 3)
    assert len({tuple(one[0, 0].tolist()) for one in noisy}) == 3
    again = drawn.pictures(mask, room, 1.0, torch.Generator().manual_seed(0))
    assert torch.equal(noisy, again)


def test_labels_are_the_characters_after_each_token_and_below_each_column() -> None:
    chars, edges = np.zeros((1, lines.MOST), np.uint8), np.full((1, lines.MOST + 1), -1, np.int16)
    chars[0, :3], edges[0, :4] = list(b"a b"), [10, 24, 30, 50]
    masks, room = np.zeros((1, 48, 64), np.uint8), np.zeros(1, np.float32)
    batch = feed.Batch.of(lines.Lines(masks, chars, edges, room), 0, torch.device("cpu"))
    _, after, begin = train.tokens_of(batch, "Go")
    following, middle, columns = train.labels_of(batch, after, begin)
    assert after[0, : begin + 4].tolist() == [folder.VISION_END, *b"Go", folder.IM_END, folder.IM_START, *b"a b", folder.IM_END]
    answer = [value for value in following[0].tolist() if value != -100]
    assert answer == [*b"a b", folder.IM_END]
    assert following[0, begin - 1] == ord("a")
    assert middle[0, begin - 1 : begin + 3].tolist() == [17 // 8, 27 // 8, 40 // 8, 50 // 8]
    assert columns[0].tolist() == [0, ord("a"), ord("a"), ord(" "), ord("b"), ord("b"), 0, 0]


def test_muon_makes_singular_values_about_one() -> None:
    for shape in ((3, 24, 60), (2, 60, 24)):
        values = torch.linalg.svdvals(weights.orthogonal(torch.randn(shape)))
        assert values.min() > 0.4
        assert values.max() < 1.4


def test_weights_change_matrices_by_muon_and_the_rest_by_adamw_and_come_back_from_a_state() -> None:
    made = reader()
    own = weights.Weights(made, 0.01, torch.float32)
    before, state = {name: one.detach().clone() for name, one in own.named.items()}, None
    for _ in range(2):
        torch.stack([(one * torch.randn_like(one)).sum() for one in made.parameters()]).sum().backward()
        own.step(1.0)
        state = state or {"main": [one.detach().clone() for one in own.named.values()]}
    assert all(not torch.equal(one, before[name]) for name, one in own.named.items())
    change = own.named["mtp.fc.weight"].detach() - before["mtp.fc.weight"]
    assert torch.linalg.matrix_norm(change, 2) < 2 * 1.4 * 0.01 * 0.2 * 128**0.5 + 0.01
    kept = own.state()
    other = weights.Weights(reader(), 0.01, torch.float32)
    other.load({"main": kept["main"], "momenta": kept["momenta"], "adamw": kept["adamw"]})
    assert all(torch.equal(one, own.named[name]) for name, one in other.named.items())


def test_it_computes_the_logits_of_transformers(saved: tuple[Any, Path]) -> None:
    """Of a picture of 200 tokens, so that the delta rule has several chunks; question and answer behind it."""
    from transformers import AutoModelForImageTextToText, AutoTokenizer, Qwen2VLImageProcessorPil

    made, path = saved
    auto: Any = AutoModelForImageTextToText
    theirs = auto.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    pixels = np.random.default_rng(0).integers(0, 256, (80, 640, 3), dtype=np.uint8)
    processor: Any = Qwen2VLImageProcessorPil.from_pretrained(path)
    inputs = processor([Image.fromarray(pixels)], return_tensors="pt")
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Read."}]}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) + TEXT
    ids = tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * 200), return_tensors="pt").input_ids
    before, after = folder.prompt_of("Read.")
    after = [*after, *TEXT.encode()]
    assert ids[0].tolist() == [*before, *[folder.IMAGE_PAD] * 200, *after]
    assert tokenizer.decode(ids[0, -len(TEXT) :]) == TEXT
    with torch.no_grad():
        expected = theirs(input_ids=ids, mm_token_type_ids=(ids == folder.IMAGE_PAD).int(), **inputs).logits[0, 202:]
        found = made(torch.from_numpy(pixels)[None], torch.tensor([before]), torch.tensor([after]))[0][0]
    assert torch.allclose(found, expected, atol=1e-4, rtol=1e-4), float((found - expected).abs().max())


def test_its_mtp_layer_is_the_one_of_the_definition() -> None:
    made = reader()
    tensors = {name.removeprefix("mtp."): own.detach() for name, own in made.named_parameters() if name.startswith("mtp.")}
    table = made.model.language_model.embed_tokens.weight.detach()
    config = folder.config_of(made.shape)["text_config"]
    definition = Mtp(tensors=tensors, embedding=table, output=table, config=config)
    tokens, hidden = torch.arange(9) + 60, torch.randn(9, made.shape.size)
    cos, sin = model.text_angles(made.shape, 9, (0, 0), 0, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        found = made.mtp(table[tokens][None], hidden[None], cos, sin)[0]
    assert torch.allclose(found, definition(tokens, hidden), atol=1e-5)


@pytest.mark.second
def test_training_goes_on_while_one_process_draws_lines(fonts: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = {child.pid for child in active_children()}
    seen, _ = lines.find_fonts(fonts, UNSEEN)
    made = feed.Feed(seen, processes=2, pixels=8 * 64 * 160, seed=0)
    first, second = (child for child in active_children() if child.pid not in before)
    batches = made.batches(torch.device("cpu"))
    next(batches)
    first.kill()
    assert all(next(batches).masks.shape[0] >= 8 for _ in range(20))
    second.kill()
    with pytest.raises(RuntimeError, match="all processes that draw lines ended"):
        deque(batches, maxlen=0)
    said = capfd.readouterr().out
    assert "ended; 1 go on" in said
    assert "ended; 0 go on" in said


@pytest.mark.second
def test_training_writes_a_folder_and_goes_on_from_it(
    fonts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "Shape", lambda: vision.Shape(**SHAPE))
    words = [str(tmp_path), "--fonts", str(fonts), "--unseen", UNSEEN, "--processes", "2", "--device", "cpu", "--tests", "8"]
    words += ["--minutes", "30", "--pixels", str(8 * 64 * 160)]
    train.main([*words, "--steps", "40"])
    first = torch.load(tmp_path / "state.pt", weights_only=True)
    train.main([*words, "--steps", "60", "--resume"])
    second = torch.load(tmp_path / "state.pt", weights_only=True)
    assert (first["steps"], second["steps"]) == (40, 60)
    assert 0 < first["share"] < second["share"] < 0.1
    said = capsys.readouterr().out.splitlines()
    losses = [float(line.split(" loss ")[1].split()[0]) for line in said if " loss " in line]
    assert 0 < losses[-1] < losses[0] < 5.6  # log(264)
    assert all("unseen 0.0000" in line for line in said if " loss " in line)
    assert {"config.json", "model.safetensors", "preprocessor_config.json"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.second
def test_jobs_over_pictures_agree_with_each_other_and_with_transformers(
    saved: tuple[Any, Path], fonts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = check.make_rows(fonts, UNSEEN, 24)
    assert rows["font"].to_list() == ["seen", "unseen"] * 12
    found = check.check(str(saved[1]), rows, tmp_path, [], 2)
    said = capsys.readouterr().out
    assert found == {"seen": 0.0, "unseen": 0.0}, said
    assert said.count("no other texts") == 5
    assert said.count("mean acceptance length") == 3


def test_a_share_counts_rows_without_a_mistake() -> None:
    answers = pl.DataFrame({"font": ["seen", "seen", "unseen"], "text": ["a", "b", "c"], "completion": ["a", "B", None]})
    assert check.exact(answers) == {"seen": 0.5, "unseen": 0.0}


def test_keys_of_the_check_may_stand_before_and_after_its_options(fonts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(check, "make_rows", lambda *given: given)

    def checked(model: Any, rows: Any, folder: Path, keys: Any, transformers: int) -> bool:
        calls.append((model, rows, keys))
        return True

    monkeypatch.setattr(check, "check", checked)
    options = ["--fonts", f"{fonts}", "--rows", "3"]
    for given in (["out", *options, "device=cpu"], ["out", "device=cpu", *options]):
        assert check.main(given) == 0
    assert calls == [("out", (fonts, check.UNSEEN, 3), ["device=cpu"])] * 2
