"""The studies: beside the package, runnable from the clone, and not in the wheel."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from setuptools import find_packages

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
#: Module that parses a command line -> the name that its help has.
NAMES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__"): name
    for path in sorted((ROOT / "studies").rglob("*.py"))
    if 'if __name__ == "__main__":' in (text := path.read_text(encoding="utf-8"))
    for name in re.findall(r'command_parser\(\s*"([\w.]+)"', text)
}


def test_the_wheel_has_every_room_and_no_study():
    [include] = re.findall(
        r"packages\.find\]\ninclude = \[\"(.*)\"\]", (ROOT / "pyproject.toml").read_text()
    )
    packages = find_packages(str(ROOT), include=[include])
    folders = {
        ".".join(path.relative_to(ROOT).parent.parts) for path in (ROOT / "rmetric").rglob("*.py")
    }
    assert set(packages) == folders


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_study_that_a_page_names_can_be_run_with_these_options(page):
    text = page.read_text(encoding="utf-8")
    for module, options in re.findall(r"-m (studies\.[\w.]*\w)([^`\n#]*)", text):
        path = ROOT.joinpath(*module.split("."))
        main = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        assert main.is_file(), module
        folder = ROOT / "studies" / module.split(".")[1]
        sources = "".join(p.read_text(encoding="utf-8") for p in folder.rglob("*.py"))
        for option in re.findall(r"(--[a-z-]+)", options):
            assert option.removeprefix("--") in sources, f"{module} {option}"


def test_the_help_of_a_study_says_how_it_is_run():
    assert len(NAMES) > 15
    assert {module: f"studies.{name}" for module, name in NAMES.items()} == {m: m for m in NAMES}
