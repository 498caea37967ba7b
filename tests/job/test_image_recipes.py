"""The recipes over images, run on a tiny random model as their comments say: what comes out, and that the comments are right."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import polars as pl
import pytest
from safetensors.torch import load_file, save_file

from batchspec import run
from batchspec.config.compose import compose
from tests.helpers.image_models import make_image_model, picture
from tests.helpers.pdfs import Page, make_pdf

pytestmark = pytest.mark.second

RECIPES = Path(__file__).parents[2] / "jobs/recipes"
NGRAM, WINDOW, MIXED = 30, 100, 0.01
"""The rule of the recipe, and by how much the looping model's layers that mix tokens count."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_model(tmp_path_factory.mktemp("models") / "vl", "qwen3_5", seed=3)


@pytest.fixture(scope="module")
def looping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in which the next token depends on the last one more than on others, so that greedy answers repeat themselves."""
    folder = make_image_model(tmp_path_factory.mktemp("models") / "loops", "qwen3_5", seed=3, mtp=True)
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        mixed = [name for name in weights if name.endswith(("self_attn.o_proj.weight", "linear_attn.out_proj.weight"))]
        save_file(weights | {name: MIXED * weights[name] for name in mixed}, file, metadata={"format": "pt"})
    return folder


def answers(model: Path, folder: Path, recipe: str, *more: str) -> pl.DataFrame:
    keys = [f"+job={recipe}", f"model.path={model}", "model.max_len=1000", "model.dtype=float32", f"output.dir={folder}/out"]
    assert run.main([*keys, "output.overwrite=true", *more]) == 0
    return pl.read_parquet(sorted((folder / "out/data").glob("*.parquet")))


def comments(recipe: str) -> list[str]:
    """The comments at the top, each command and each line of Python on one line."""
    top = (RECIPES / f"{recipe}.yaml").read_text(encoding="utf-8").split("\ndefaults:")[0]
    text = re.sub(r"\\\n# +", "", top)
    return [line.removeprefix("#").strip() for line in text.splitlines()]


def repeats(tokens: list[int]) -> bool:
    """Whether an n-gram comes twice within the window."""
    first: dict[tuple[int, ...], int] = {}
    for end in range(NGRAM, len(tokens) + 1):
        gram = tuple(tokens[end - NGRAM : end])
        if gram in first and end - first[gram] <= WINDOW:
            return True
        first.setdefault(gram, end - NGRAM)
    return False


@pytest.mark.parametrize("recipe", ["ocr", "caption", "label"])
def test_the_command_in_the_comment_is_one_that_batchspec_takes_with_the_keys_of_the_recipe(recipe: str) -> None:
    (command,) = [line for line in comments(recipe) if line.startswith("batchspec run ")]
    config = compose(shlex.split(command)[2:], require=("model.path", "input.path"))
    assert config.input.chat
    assert (config.input.columns, config.output.dir) == ({"images": "image"}, f"./out/{recipe}")
    assert config.input.prompt


def test_ocr_writes_the_answer_to_every_page_in_order_and_keeps_loops_out(looping: Path, tmp_path: Path) -> None:
    (tmp_path / "papers").mkdir()
    for name, count in (("b", 2), ("a", 4)):
        pages = [Page(lines=(f"{name} {number}",), colour=(0.2 * number, 0.5, 0.3)) for number in range(count)]
        (tmp_path / f"papers/{name}.pdf").write_bytes(make_pdf(pages))
    keys = (f"input.path={tmp_path}/papers/*.pdf", "decode.max_new_tokens=260", "decode.ignore_eos=true")
    found = answers(looping, tmp_path, "ocr", *keys, "output.shard_rows=2")
    assert found.select("doc", "page").rows() == [*(("a.pdf", page) for page in range(1, 5)), ("b.pdf", 1), ("b.pdf", 2)]
    assert found["completion"].null_count() == 0
    assert found["spec_decode"].struct.field("drafter").unique().to_list() == ["mtp"]
    assert not {"messages", "prompt_ids", "image"} & set(found.columns)
    assert not any(map(repeats, found["token_ids"].to_list()))
    free = answers(looping, tmp_path, "ocr", *keys, "decode.no_repeat_ngram.ngram_size=0")
    looped = free.filter(finish_reason="repetition")
    assert len(looped) > 0
    assert looped["status"].unique().to_list() == ["truncated"]
    assert all(len(tokens) < 260 for tokens in looped["token_ids"])
    unguarded = answers(
        looping, tmp_path, "ocr", *keys, "decode.no_repeat_ngram.ngram_size=0", "decode.repetition_detection.max_pattern_size=0"
    )
    assert any(map(repeats, unguarded["token_ids"].to_list()))
    (join,) = [line for line in comments("ocr") if line.startswith("pl.read_parquet")]
    joined = eval(join.replace("out/ocr", f"{tmp_path}/out"), {"pl": pl})
    assert joined["doc"].to_list() == ["a.pdf", "b.pdf"]
    assert joined["completion"][1] == "\n\n".join(unguarded.filter(doc="b.pdf")["completion"])
    failed = pl.DataFrame({"doc": ["c.pdf"] * 3, "completion": ["one", None, "three"]})
    failed.write_parquet(next((tmp_path / "out/data").glob("*.parquet")))
    joined = eval(join.replace("out/ocr", f"{tmp_path}/out").replace("*", "part-00000"), {"pl": pl})
    assert joined["completion"].to_list() == ["one\n\n[page not read]\n\nthree"]


def test_ocr_reads_several_pages_in_a_row(model: Path, tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"p{number}.png").write_bytes(picture(64, 48, number))
    rows = pl.DataFrame({"id": ["x", "y"], "image": [["p0.png", "p1.png", "p2.png"], ["p1.png"]]})
    rows.write_ndjson(tmp_path / "in.jsonl")
    keys = (f"input.path={tmp_path}/in.jsonl", f"input.image_root={tmp_path}", "decode.max_new_tokens=8")
    found = answers(model, tmp_path, "ocr", *keys)
    assert found["request_id"].to_list() == ["x", "y"]
    tokens = found["usage"].struct.field("image_tokens").to_list()
    assert tokens == [3 * tokens[1], 48]
    assert found["image_digest"].str.len_chars().to_list() == [96, 32]
    assert found["status"].to_list() == ["truncated"] * 2


def test_caption_describes_each_image_and_keeps_the_other_columns(model: Path, tmp_path: Path) -> None:
    images = [{"bytes": picture(40, 50, number), "path": f"{number}.png"} for number in (0, 1, 0)]
    pl.DataFrame({"image": images, "product": ["cup", "hat", "cup"]}).write_parquet(tmp_path / "in.parquet")
    keys = (f"input.path={tmp_path}/in.parquet", "decode.max_new_tokens=24", "decode.ignore_eos=true")
    found = answers(model, tmp_path, "caption", *keys)
    assert found["product"].to_list() == ["cup", "hat", "cup"]
    assert "image" not in found.columns
    assert (found["completion"][0] == found["completion"][2], found["token_ids"].list.len().to_list()) == (True, [24] * 3)
    assert found["image_digest"][0] != found["image_digest"][1]
    words = 'input.prompt="Alt text of {{ product }}"'
    several = answers(model, tmp_path, "caption", *keys, words, "decode=sampled", "decode.n=2")
    assert several.select("row_index", "sample_index").rows() == [(row, sample) for row in range(3) for sample in range(2)]


def test_label_gives_probabilities_of_all_labels_for_pages_images_and_texts(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(make_pdf([Page(colour=(0.0, 0.2, 0.9)), Page(colour=(1.0, 0.0, 0.0))]))
    pages = answers(model, tmp_path, "label", f"input.path={tmp_path}/a.pdf")
    labels = ["text", "table", "figure", "form", "blank"]
    for row in pages.to_dicts():
        probs = [one["prob"] for one in row["choice_probs"]]
        assert [one["choice"] for one in row["choice_probs"]] == labels
        assert sum(probs) == pytest.approx(1)
        assert row["completion"] == labels[probs.index(max(probs))]
    assert pages["choice_probs"][0].to_list() != pages["choice_probs"][1].to_list()
    assert pages.select("doc", "page").rows() == [("a.pdf", 1), ("a.pdf", 2)]
    table = pl.DataFrame({"image": [picture(40, 50, 0)] * 2, "review": ["very good", "a b"], "own": [["x", "y"], ["z", "w"]]})
    table.write_parquet(tmp_path / "in.parquet")
    own = answers(model, tmp_path, "label", f"input.path={tmp_path}/in.parquet", "input.columns={images: image, choice: own}")
    assert [[one["choice"] for one in row] for row in own["choice_probs"].to_list()] == [["x", "y"], ["z", "w"]]
    texts = answers(
        model, tmp_path, "label", f"input.path={tmp_path}/in.parquet", "input.columns={images: null}", "decode.choice=[yes,no]",
        'input.prompt="Is this review good or bad? {{ review }}"',
    )
    assert "image_digest" not in texts.columns
    (sure,) = [line for line in comments("label") if line.startswith("rows.filter")]
    likeliest = [max(one["prob"] for one in row) for row in texts["choice_probs"]]
    assert len(eval(sure, {"pl": pl, "rows": texts})) == sum(prob > 0.9 for prob in likeliest)
