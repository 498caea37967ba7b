"""Lines of Python per package, and how many each may have: `python -m tests.sizes` prints the table.

.ci/sizes.txt has the ceilings. A package that outgrows its ceiling fails tests/house/test_sizes.py until the same commit edits
the file, and its message says what the lines are worth. After a removal, lower the ceiling.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
CEILINGS = ROOT / ".ci/sizes.txt"
LINKS = ("batchspec/kernels", "batchspec/conf")
"""Links to the folders at the top, whose lines count there."""


def lines_of(root: Path = ROOT) -> Counter[str]:
    """Lines of .py files, also blank ones. Modules outside a package count under their top folder, all tests under `tests`."""
    lines: Counter[str] = Counter()
    for top in ("batchspec", "kernels", "tests"):
        for path in (root / top).rglob("*.py"):
            parts = path.relative_to(root).parts
            package = "/".join(parts[:2]) if len(parts) > 2 and top != "tests" else top
            if package not in LINKS:
                lines[package] += path.read_text(encoding="utf-8").count("\n")
    return lines


def ceilings(text: str) -> dict[str, int]:
    """text: of .ci/sizes.txt, `PACKAGE LINES` per line; # begins a comment"""
    words = [line.partition("#")[0].split() for line in text.splitlines()]
    return {line[0]: int(line[1]) for line in words if line}


def faults(lines: Counter[str], allowed: dict[str, int]) -> list[str]:
    """One line per package that is over its ceiling or has none, and per ceiling whose package is gone."""
    over = {name for name, count in lines.items() if count > allowed.get(name, count)}
    return [
        *(f"{name}: {lines[name]:,} lines, ceiling {allowed[name]:,}" for name in sorted(over)),
        *(f"{name}: {lines[name]:,} lines and no ceiling" for name in sorted(lines.keys() - allowed)),
        *(f"{name}: a ceiling, but no such package" for name in sorted(allowed.keys() - lines)),
    ]


def main() -> None:
    lines, allowed = lines_of(), ceilings(CEILINGS.read_text(encoding="utf-8"))
    for name, count in sorted(lines.items()):
        print(f"{name:28}{count:8,}{allowed.get(name, 0):10,}")
    product = sum(count for name, count in lines.items() if name != "tests")
    print(f"{'batchspec and kernels':28}{product:8,}{sum(allowed.values()) - allowed.get('tests', 0):10,}")


if __name__ == "__main__":
    main()
