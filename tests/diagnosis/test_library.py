"""The fault library: each signature against its own examples and against all the others."""

import re
import warnings
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import rmetric
from rmetric._util.lazy import read_yaml
from rmetric.diagnosis.library import SignatureError, SignatureLibrary, form_of
from rmetric.diagnosis.library.load import PATTERN_SECONDS, QUIET_ROLES, check, compiled
from rmetric.telemetry.xid import catalogue

LIBRARY = SignatureLibrary.shipped()
ALL = list(LIBRARY)
OWN = """
- id: my_fault
  family: own
  title: Our service is away
  role: cause
  actor: platform
  patterns: ['service (?<host>\\S+) is away']
  gates: [is away]
  to_do: [Call the service desk.]
  matches: ['service alpha is away']
  misses: ['service alpha is a way to go']
"""


TABLES = sorted(Path(rmetric.__file__).parent.rglob("*.yaml"))


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.name)
def test_both_loaders_of_yaml_read_a_table_alike(path):
    # A PyYAML without libyaml has only the slow one, which refuses some texts without quotes.
    assert yaml.load(path.read_text("utf-8"), yaml.SafeLoader) == read_yaml(path)


@pytest.mark.parametrize("signature", ALL, ids=lambda signature: signature.id)
def test_a_signature_is_sound_and_the_best_for_its_own_examples(signature):
    check(LIBRARY.files[signature.id], signature)
    assert signature.source
    assert signature.matches
    assert signature.misses
    assert bool(signature.to_do) or signature.role in QUIET_ROLES
    assert all(text.strip() == text and text.endswith(".") for text in signature.to_do)
    level = signature.levels[0] if signature.levels else ""
    for text in signature.matches:
        assert any(LIBRARY.gate(form_of(line)) for line in text.split("\n")), text
        assert LIBRARY.find(text, level)[0][0].id == signature.id, text
    for text in signature.misses:
        assert signature.id not in [other.id for other, _ in LIBRARY.find(text, level)]


@given(st.text(max_size=200))
def test_what_no_gate_finds_no_signature_matches(text):
    if not any(LIBRARY.gate(form_of(line)) for line in text.split("\n")):
        assert LIBRARY.find(text) == []


def load(tmp_path, text, name="own.yaml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return SignatureLibrary.load([path])


def test_own_signatures_stand_beside_the_shipped(tmp_path):
    library = load(tmp_path, OWN)
    assert len(library) == len(LIBRARY) + 1
    assert library["my_fault"].actor == "platform"
    ((found, fields),) = library.find("12:00 service alpha is away")
    assert (found.id, fields) == ("my_fault", {"host": "alpha"})


BAD = {
    "pattern": ("(?<host>\\S+) is", "(?<host>\\S+ is", "patterns: found .*missing"),
    "key": ("family: own", "famly: own", "unknown field `famly`.*'family'"),
    "missing": ("  family: own\n", "", "missing required field `family`"),
    "role": ("role: cause", "role: reason", "`\\$.role`: found 'reason'.*'cause', 'symptom'"),
    "quiet": ("role: cause", "role: harmless", "actor, to_do: found 'platform'.*for success"),
    "id": ("id: my_fault", "id: My fault", "`\\$.id`: found 'My fault'"),
    "twice": ("id: my_fault", "id: cuda_out_of_memory", "cuda_out_of_memory: id: found one given"),
    "type": ("title: Our service is away", "title: 12", "got `int` - at `\\$.title`: found 12"),
    "empty": ("[is away]", "[]", "of length >= 1 - at `\\$.gates`"),
    "gate": ("[is away]", "[was away]", "gates: found 'service alpha is away'"),
    "gate case": ("[is away]", "[Is Away]", "gates.0.`: found 'Is Away'"),
    "match": ("matches: ['service alpha", "matches: ['servant alpha", "matches: found 'servant"),
    "miss": ("service alpha is a way", "service alpha is away", "misses: found 'service alpha"),
    "all": ("'service (?<host>", "'(?:service)?|(?<host>", "patterns: found .*needs some text"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_file_names_file_signature_and_field(tmp_path, case):
    before, after, words = BAD[case]
    assert before in OWN
    with pytest.raises(SignatureError, match=f"own.yaml: .*{words}"):
        load(tmp_path, OWN.replace(before, after))


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "found None, expected a list"), ("id: x", "found {"), ("- x", "entry 1: .*got `str`"),
     ("- [", "cannot be read as YAML"), ("- id: " + "9" * 100_000, "cannot be read as YAML"),
     ("- id: 2024-99-99", "cannot be read as YAML")],
)  # fmt: skip
def test_a_file_of_another_shape_is_refused(tmp_path, text, words):
    with pytest.raises(SignatureError, match=f"own.yaml: .*{words}"):
        load(tmp_path, text)
    with pytest.raises(SignatureError, match=r"absent.yaml: cannot be read"):
        SignatureLibrary.load([tmp_path / "absent.yaml"])


def test_a_pattern_that_never_ends_is_switched_off_with_one_warning(tmp_path):
    library = load(tmp_path, OWN.replace("service (?<host>\\S+)", "(?<host>(?:[a-z ]+)+)"))
    endless = "a" * 300 + "! is away"
    with pytest.warns(UserWarning, match=r"own.yaml: my_fault: switched off"):
        assert library.find(endless) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert library.find(endless) == []
        assert library.find("service alpha is away") == []


HOSTILE = ["a" * 4000, " " * 4000, "0" * 4000, "error: " * 570, "a.b/c.d " * 500, "x = 0\n" * 660,
           "[1] rank 3 " * 360, "Error nan gpu " * 280]  # fmt: skip


@pytest.mark.parametrize("signature", ALL, ids=lambda signature: signature.id)
def test_no_shipped_pattern_is_switched_off_by_a_long_entry(signature):
    texts = HOSTILE + [((text + " ") * 40)[:4000] for text in signature.matches]
    texts += ["\n".join([text] * 40)[:4000] for text in signature.misses]
    texts += [(gate * 400)[:4000] for gate in signature.gates]
    for pattern in map(compiled, signature.patterns):
        for text in texts:
            pattern.search(text, timeout=PATTERN_SECONDS / 2)


def test_levels_limit_where_a_signature_looks_and_harmless_takes_the_place_of_others(tmp_path):
    library = load(tmp_path, OWN.replace("family: own", "family: own\n  levels: [error]"))
    assert library.find("service alpha is away", "info") == []
    assert len(library.find("service alpha is away", "error")) == 1
    quiet = OWN.replace("actor: platform", "rank: 1").replace("cause", "harmless")
    library = load(tmp_path, OWN + quiet.replace("my_fault", "my_noise"))
    assert [signature.id for signature, _ in library.find("service alpha is away")] == ["my_noise"]


def test_xids_are_judged_as_the_telemetry_judges_them():
    """What is the program's own doing there is not the hardware's fault here."""
    for number, entry in catalogue().items():
        found = LIBRARY.find(f"NVRM: Xid (PCI:0000:3b:00): {number}, pid=4711, name=python")
        assert found, number
        assert found[0][1]["xid"] == str(number)
        if entry.about == "application":
            assert found[0][0].actor == "user", number
        elif entry.level == "fatal":
            assert found[0][0].actor == "hardware", number


@pytest.mark.parametrize(
    ("text", "best"),
    [
        ("2024-05-01 12:00:00.123 tarfile.ReadError: unexpected end of data", "data_file_corrupt"),
        ("[2024-05-01 12:00:00,123] KeyError: 'warm_up'", "key_error"),
        ("2024-05-01T12:00:00Z OSError: [Errno 28] No space left on device", "disk_full"),
        (
            "  traceback : Traceback (most recent call last):\n"
            '    File "train.py", line 9, in main\n'
            "  ValueError: the sequence is longer than 4096",
            "value_error",
        ),
    ],
)
def test_a_time_or_spaces_before_an_exception_do_not_hide_it(text, best):
    assert LIBRARY.find(text)[0][0].id == best
    if "\n" not in text:
        assert LIBRARY.may_match(re.sub(r"\d+", "0", text))


def test_a_time_before_a_note_makes_it_no_fault():
    assert LIBRARY.find("2024-05-01 12:00:00 INFO retries after KeyError: 'x'") == []
