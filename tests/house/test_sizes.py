"""Nothing grows unnoticed: each package has a ceiling of lines (.ci/sizes.txt), and a commit that raises one explains it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.sizes import CEILINGS, ceilings, faults, lines_of


def test_no_package_is_over_its_ceiling() -> None:
    assert faults(lines_of(), ceilings(CEILINGS.read_text(encoding="utf-8"))) == []


def test_lines_are_counted_once_and_by_package(tmp_path: Path) -> None:
    files = {
        "batchspec/run.py": 3, "batchspec/data/a.py": 2, "batchspec/data/dataset/b.py": 4, "kernels/moe/c.py": 5,
        "tests/x/d.py": 1,
    }
    for name, count in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("\n" * count)
    (tmp_path / "batchspec/kernels").symlink_to(tmp_path / "kernels")
    assert lines_of(tmp_path) == {"batchspec": 3, "batchspec/data": 6, "kernels/moe": 5, "tests": 1}


def test_growth_new_packages_and_packages_that_are_gone_are_told() -> None:
    allowed = ceilings("# why\nbatchspec/a 10  # room for more\n\nbatchspec/gone 5\nbatchspec/b 7\n")
    assert faults(Counter({"batchspec/a": 10, "batchspec/b": 8, "batchspec/new": 1}), allowed) == [
        "batchspec/b: 8 lines, ceiling 7", "batchspec/new: 1 lines and no ceiling",
        "batchspec/gone: a ceiling, but no such package",
    ]
