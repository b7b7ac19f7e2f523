"""Each number of the README and the findings is a claim, and each claim stands in its documents."""

import re

import pytest
from msgspec.structs import replace

from studies.claims.__main__ import (
    PAGE,
    SHOWN,
    main,
    page,
    printed,
    problem_recomputed,
    problem_stated,
)
from studies.claims.table import ROOT, load, pattern, uncovered
from studies.common.markers import parts

TABLE = load()
CLAIMS = {claim.name: claim for claim in TABLE.claims}
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("claim", TABLE.claims, ids=CLAIMS)
def test_a_claim_stands_in_its_documents_as_in_the_results(claim):
    assert problem_stated(claim) == ""


@pytest.mark.parametrize("document", ["README.md", "docs/findings.md"])
def test_no_number_is_left_out(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    assert uncovered(text, TABLE) == []
    [found] = uncovered(f"{text}\n\nIts F1 is 0.4242 here.\n", TABLE)
    assert "0.4242" in found


def test_what_is_listed_stands_somewhere_and_its_test_exists():
    texts = " ".join(
        " ".join((ROOT / name).read_text(encoding="utf-8").split())
        for name in ("README.md", "docs/findings.md")
    )
    texts = re.sub(r"\]\([^)]*\)", "]", texts)
    for text in (*TABLE.elsewhere, *TABLE.no_results):
        assert pattern(text).search(texts), text
    assert all((ROOT / test).is_file() for test in TABLE.elsewhere.values())


def test_a_document_that_states_another_number_is_red(monkeypatch, tmp_path, capsys):
    wrong = replace(CLAIMS["guard-in-short"], documents=(str(tmp_path / "wrong.md"),))
    (tmp_path / "wrong.md").write_text("the rules alone announce | 9.9 %")
    assert "states ['9.9'], the results have ['4.3']" in problem_stated(wrong)
    monkeypatch.setattr("studies.claims.__main__.load", lambda: replace(TABLE, claims=(wrong,)))
    monkeypatch.setattr("sys.argv", ["claims", "--stated"])
    assert main() == 1
    assert capsys.readouterr().out.startswith("red   guard-in-short")
    (tmp_path / "wrong.md").write_text("nothing")
    assert "stands 0 times" in problem_stated(wrong)


def test_a_recomputed_value_beyond_the_tolerance_is_red(tmp_path):
    claim = CLAIMS["guard-in-short"]
    table = (ROOT / claim.source.results / "risk_24h.csv").read_text(encoding="utf-8")
    for near, far in ((4.34, False), (4.36, True)):
        changed = re.sub("^Rules alone,4.3,", f"Rules alone,{near},", table, flags=re.MULTILINE)
        (tmp_path / "risk_24h.csv").write_text(changed, encoding="utf-8")
        assert bool(problem_recomputed(claim, tmp_path)) is far
    (tmp_path / "risk_24h.csv").unlink()
    assert "no such file" in problem_recomputed(claim, tmp_path)


def test_the_page_is_made_from_the_table():
    assert PAGE.read_text(encoding="utf-8") == page(TABLE)


def test_the_readme_shows_what_is_printed():
    shown = parts(ROOT / "README.md")
    assert {name: shown[name].strip() for name in SHOWN} == printed()


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 120
    assert len(re.findall(r"^!\[", README, re.MULTILINE)) == 1
    for link in ("2025.emnlp-industry.193", "smfatima3/LLM_reliability", "make reproduce"):
        assert link in README
