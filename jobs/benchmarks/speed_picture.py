"""Writes jobs/pages/speed.svg from the tables of jobs/pages/PERFORMANCE.md: `python jobs/benchmarks/speed_picture.py`.

Bars of whole requests in seconds, vLLM and batchspec, each with the faster of its two figures (without and with drafts).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PAGES = Path(__file__).parents[1] / "pages"
TABLE, PICTURE = PAGES / "PERFORMANCE.md", PAGES / "speed.svg"
SHOWN = (
    ("8B, 64 x 8192", ""), ("8B, 256 x 1024", ""), ("1B, 256 x 1024", ""), ("135M, 256 x 512", ""),
    ("gpt-oss-20b, MXFP4", "256 x 1024"), ("gpt-oss-120b, MXFP4", "256 x 1024"), ("Qwen3-30B-A3B, FP8", "256 x 1024"),
    ("Qwen3.5-35B-A3B, bf16", "256 x 1024"), ("Gemma 4 26B-A4B, bf16", "128 x 1024"), ("GLM-4.5-Air, FP8", "24 x 4096"),
)
"""Rows of the picture: the model, and the workload if it has a cell of its own."""
LEFT, WIDEST, WIDTH, TOP, LINE, BAR = 265, 400, 760, 50, 44, 15
STYLE = """\
  text { font: 13px system-ui, sans-serif; fill: #24292f }
  .title { font-weight: 600 }
  .peer { fill: #8c959f }
  .own { fill: #0969da }
  .paper { fill: #ffffff }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .peer { fill: #6e7681 } .own { fill: #4493f8 } .paper { fill: #0d1117 }
  }"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Seconds of whole requests of one workload, as the page writes them."""

    label: str
    vllm_s: str
    batchspec_s: str


def rows() -> list[Bars]:
    """The rows of SHOWN. Raises KeyError if the page lacks one."""
    seconds: dict[tuple[str, str], Bars] = {}
    names: list[str] = []
    model = ""
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [_without_note(cell) for cell in line.strip("|").split("|")]
        if line.startswith(("| workload", "| model")):
            names = cells
        elif line.startswith("| ") and "vLLM s" in names and len(cells) == len(names):
            by_name = dict(zip(names, cells, strict=True))
            model = cells[0] or model
            key = (model, by_name.get("workload", "") if names[0] == "model" else "")
            label = ", ".join(part for part in key if part)
            vllm_s, batchspec_s = _fastest(by_name["vLLM s"]), _fastest(by_name["batchspec s"])
            seconds[key] = Bars(label=label, vllm_s=vllm_s, batchspec_s=batchspec_s)
    return [seconds[key] for key in SHOWN]


def svg(shown: list[Bars]) -> str:
    """The picture. Bars of a workload are relative to its vLLM."""
    height = TOP + LINE * len(shown) + 8
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="title">',
        '<title id="title">Seconds of whole requests, vLLM 0.33.0 and batchspec</title>',
        f"<style>\n{STYLE}\n</style>",
        '<rect class="paper" width="100%" height="100%" rx="6"/>',
        '<text class="title" x="8" y="22">Seconds of whole requests on one H200, shorter is better</text>',
    ]
    for kind, x, name in (("peer", LEFT + 190, "vLLM 0.33.0, best K"), ("own", LEFT + 350, "batchspec")):
        lines.append(f'<rect class="{kind}" x="{x}" y="11" width="12" height="12"/><text x="{x + 18}" y="22">{name}</text>')
    for index, bars in enumerate(shown):
        y = TOP + LINE * index
        lines.append(f'<text x="{LEFT - 10}" y="{y + BAR + 5}" text-anchor="end">{bars.label}</text>')
        for kind, at, value in (("peer", y, bars.vllm_s), ("own", y + BAR + 2, bars.batchspec_s)):
            width = WIDEST * float(value) / float(bars.vllm_s)
            lines.append(f'<rect class="{kind}" x="{LEFT}" y="{at}" width="{width:.0f}" height="{BAR}" rx="2"/>')
            lines.append(f'<text x="{LEFT + width + 6:.0f}" y="{at + BAR - 3}">{value} s</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _without_note(cell: str) -> str:
    """A cell without the letters of its footnotes: `8B, 256 x 1024 (a)`."""
    return cell.strip().split(" (")[0]


def _fastest(cell: str) -> str:
    """The smaller of the figures of a cell: `24.7 / 21.5`."""
    return min(cell.split(" / "), key=float)


if __name__ == "__main__":
    PICTURE.write_text(svg(rows()), encoding="utf-8")
