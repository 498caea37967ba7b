"""The pages say what is there: their links, keys, columns and modules exist, and the README stays short."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pyarrow as pa
import pytest

from batchspec import cli
from batchspec.config.reference import options
from batchspec.config.schema import OutputConfig
from batchspec.config.train_schema import TrainRun
from batchspec.config.typed import keys
from batchspec.data.dataset.columns import TYPES, map_columns
from batchspec.data.dataset.schema import output_schema
from tests import demo_picture

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "jobs"
NAMES = ("README.md", "conf/README.md", "batchspec/README.md", "kernels/README.md", ".github/CONTRIBUTING.md")
PAGES = [*(ROOT / name for name in NAMES), *sorted(JOBS.glob("*.md")), *sorted((JOBS / "pages").rglob("*.md"))]
DECISIONS = sorted((JOBS / "pages/decisions").glob("*.md"))
MOST_WORDS = {".github/CONTRIBUTING.md": 600, "jobs/pages/versions.md": 500}
MOST_WORDS |= {f"jobs/pages/decisions/{page.name}": 300 for page in DECISIONS}
FOLDERS = ("*", "data/*", "job/*")
PACKAGES = [path for folder in FOLDERS for path in (ROOT / "batchspec").glob(f"{folder}/__init__.py")]
INDEXES = [path for path in PACKAGES if ".py" in path.read_text(encoding="utf-8")]
KEYS = {*keys(), *keys(TrainRun())}
GROUPS = {key.rpartition(".")[0] for key in KEYS} | {"draft.tree"}
KEY = re.compile(
    r"(?<![\w./-])((?:model|draft|decode|packing|input|output|resume|cluster|ablation|train)(?:\.[a-z_]+)+)(?![\w/(])"
)
NOT_KEYS = {"input.columns.messages", "input.columns.prompt", "input.columns.choice", "input.columns.schema", "train.py"}


def page_ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(path: Path) -> set[str]:
    """The names that a page's headings have in links."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def section_of(page: str, heading: str) -> str:
    return (JOBS / "pages" / page).read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]


def test_the_readme_has_at_most_120_lines() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize(("page", "words"), MOST_WORDS.items())
def test_a_page_of_reasons_or_rules_stays_short(page: str, words: int) -> None:
    assert len((ROOT / page).read_text(encoding="utf-8").split()) <= words


def test_all_pages_but_the_notebook_and_the_keys_have_at_most_22_000_words_without_the_bars_of_tables() -> None:
    pages = [page for page in PAGES if page_ids(page) not in {"conf/README.md", "jobs/pages/NOTEBOOK.md"}]
    assert sum(len(re.findall(r"\S*\w\S*", page.read_text(encoding="utf-8"))) for page in pages) <= 22_000


@pytest.mark.parametrize("page", PAGES, ids=page_ids)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for link in (link for link in links if "://" not in link):
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not heading or heading in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=page_ids)
def test_every_key_and_option_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = {
        name for name in KEY.findall(text) if not name.endswith((".py", ".md", ".yaml", ".parquet", ".safetensors", ".json"))
    }
    assert named - KEYS - GROUPS - NOT_KEYS == set()
    chosen = re.findall(
        r"(?<![\w.-])(model|draft|decode|packing|input|output|resume|ablation|\+job)=([a-z][\w-]*)(?![\w./*])", text
    )
    known = {group.replace("job", "+job"): names for group, names in options().items()}
    own = {("+job", "mine"), ("model", "llama8b")}  # the second is a column of a kernel benchmark
    assert {(group, name) for group, name in chosen if name not in known[group]} <= own


def test_the_index_of_the_job_pages_names_every_folder_and_file_below_it() -> None:
    index = (JOBS / "README.md").read_text(encoding="utf-8")
    folders = {path for path in JOBS.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert {folder.name for folder in folders if f"- `{folder.name}/`" not in index} == set()
    present = {path.name for folder in folders for path in folder.iterdir() if path.is_file()}
    assert {name for name in present if not re.search(rf"[`\[]{re.escape(name)}[`\]]", index)} == {"report.png", "speed.svg"}


def test_readme_shows_the_lines_and_the_picture_of_one_run_of_the_demo() -> None:
    assert demo_picture.block_of_readme() == demo_picture.lines_of_picture(), "python -m tests.demo_picture makes both anew"


def test_every_column_of_the_input_is_in_its_page() -> None:
    section = section_of("input.md", "Columns")
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    only_benchmarks = {"synthetic_len"}
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted({*TYPES} - only_benchmarks)


def test_every_column_of_the_output_is_in_its_page() -> None:
    section = section_of("output.md", "Columns")
    output = OutputConfig(messages="full", token_ids=True, prompt_ids=True, logprobs=2, passthrough="none")
    given = pa.schema([("prompt", pa.string())])
    schema = output_schema(given, map_columns(given, {}), output)
    for field in schema:
        assert re.search(rf"\| (`\w+`, )?`{field.name}`", section), field.name
    for name in ("usage", "error", "spec_decode", "perf"):
        for inner in schema.field(name).type:
            assert re.search(rf"`\.?{inner.name}`", section), f"{name}.{inner.name}"


def test_every_module_that_a_page_runs_or_names_exists() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for module in re.findall(r"python -m (batchspec(?:\.[a-z_]+)*)\b(?!\.)", text):
            assert importlib.util.find_spec(module), f"{page_ids(page)}: {module}"
        for command in re.findall(r"`batchspec ([a-z]+)[ `]", text):
            assert command in cli.COMMANDS, f"{page_ids(page)}: batchspec {command}"


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "batchspec/README.md", *DECISIONS], ids=page_ids)
def test_every_source_file_that_a_page_names_exists(page: Path) -> None:
    for name in re.findall(r"`([\w/]+/[\w]+\.(?:py|sh|sbatch|yaml))`", page.read_text(encoding="utf-8")):
        assert name.startswith("mine/") or (ROOT / name).exists() or (ROOT / "batchspec" / name).exists(), name


@pytest.mark.parametrize("index", INDEXES, ids=page_ids)
def test_the_index_of_a_package_names_all_of_its_modules(index: Path) -> None:
    """Of packages whose docstring lists modules. In `commands`, modules that are subcommands are in the list of `cli.py`."""
    named = set(re.findall(r"\b([a-z_0-9]+\.py)\b", index.read_text(encoding="utf-8")))
    present = {path.name for path in index.parent.glob("*.py")} - {"__init__.py"}
    if index.parent.name == "commands":
        present -= {f"{name}.py" for name in cli.COMMANDS}
        named -= {"cli.py", *(f"{name}.py" for name in cli.COMMANDS)}
    assert present == named


def test_the_kernels_page_lists_every_kernel_with_a_wrapper_that_exists() -> None:
    listed: dict[str, list[str]] = {}
    package = ""
    for line in (ROOT / "kernels/README.md").read_text(encoding="utf-8").splitlines():
        if found := re.match(r"\| \*\*(\w+)\*\*", line):
            package = found[1]
        elif (found := re.match(r"\| (\w+) \| (`.*)", line)) and found[1] != "package":
            listed[f"{package}/{found[1]}.py"] = re.findall(r"`(\w+)\(", found[2])
    assert listed
    for name, wrappers in listed.items():
        source = (ROOT / "kernels" / name).read_text(encoding="utf-8")
        assert wrappers, name
        assert all(f"def {wrapper}(" in source for wrapper in wrappers), name
    with_reference = {
        f"{path.parent.name}/{path.name}"
        for path in (ROOT / "kernels").glob("*/*.py")
        if "@triton.jit" in (text := path.read_text(encoding="utf-8")) and "_reference(" in text
    }
    shared = {"moe/fp8_steps.py", "sampling/counter_rng.py", "sampling/ngram_search.py", "sampling/token_walk.py"}
    assert with_reference - listed.keys() <= shared, "shared parts have no line of their own"
