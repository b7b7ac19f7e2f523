"""Every command without the packages that are optional."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rmetric.cli import COMMANDS

#: Import names of the packages that no study needs to print its help.
OPTIONAL = (
    "torch transformers accelerate datasets peft pynvml bitsandbytes pooch psutil dask distributed "
    "prometheus_client simpy tensorboard zstandard lightning river trainpulse trainproof trainscope"
)
#: And of those that every study needs, but no command.
OF_STUDIES = " matplotlib pandas scipy sklearn seaborn graphviz drain3 regex yaml dtaidistance"
ROOT = Path(__file__).resolve().parents[2]
SITE = """
import os
from importlib.machinery import PathFinder

found = PathFinder.find_spec

def find_spec(name, path=None, target=None):
    is_left_out = name.partition(".")[0] in os.environ["WITHOUT"].split()
    return None if is_left_out else found(name, path, target)

PathFinder.find_spec = find_spec
"""
HELP = """
import contextlib, io, runpy, sys
for words in sys.argv[1].split(","):
    module, *arguments = words.split()
    out, sys.argv = io.StringIO(), [module, *arguments, "--help"]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert (end.code or 0) == 0, (words, end.code, out.getvalue())
    assert out.getvalue().startswith("usage: "), (words, out.getvalue())
"""
SCRIPTS = (
    "generate_all_figures generate_paper_tables replay_and_analyze_logs run_modern_experiments "
    "run_case_study simulator"
)


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Environment of a Python that has none of the optional packages."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(SITE)
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        "WITHOUT": OPTIONAL,
    }


def run(bare, *arguments, folder=ROOT):
    return subprocess.run(
        [sys.executable, *arguments], env=bare, cwd=folder, capture_output=True, text=True
    )


def test_the_optional_packages_are_missing_in_these_tests(bare):
    for name in ("psutil", "torch", "tensorboard"):
        assert "ModuleNotFoundError" in run(bare, "-c", f"import {name}").stderr


def test_every_command_and_script_prints_its_help_without_optional_packages(bare):
    commands = ",".join(f"rmetric {name}" for name in COMMANDS)
    done = run(bare | {"WITHOUT": OPTIONAL + OF_STUDIES}, "-c", HELP, commands)
    assert done.returncode == 0, done.stderr
    done = run(bare, "-c", HELP, ",".join(SCRIPTS.split()))
    assert done.returncode == 0, done.stderr


def test_a_replay_without_matplotlib_says_how_to_get_plots(bare, tmp_path):
    lines = "".join(f'{{"step": {step}, "loss": 2.0}}\n' for step in range(1, 30))
    (tmp_path / "a.jsonl").write_text(lines)
    bare = bare | {"WITHOUT": OF_STUDIES}
    command = ("-m", "rmetric", "replay", "a.jsonl", "--out", "out")
    done = run(bare, *command, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    done = run(bare, *command, "--plots", "1", folder=tmp_path)
    assert (done.returncode, done.stderr) == (
        2, 'error: rmetric replay needs matplotlib: pip install "rmetric[plot]"\n'
    )  # fmt: skip
    (tmp_path / "b.jsonl").write_text(lines)
    compared = ("-m", "rmetric", "compare", "a.jsonl", "b.jsonl", "--gate", "g.md")
    assert run(bare, *compared, folder=tmp_path).returncode == 5
    (tmp_path / "g.md").unlink()
    done = run(bare, *compared, "--page", "p.html", folder=tmp_path)
    assert (done.returncode, done.stdout, (tmp_path / "g.md").exists()) == (2, "", False)


@pytest.mark.studies
def test_every_study_prints_its_help_without_optional_packages(bare):
    studies = [".".join(path.relative_to(ROOT).parts[:-1])
               for path in sorted((ROOT / "studies").rglob("__main__.py"))]  # fmt: skip
    studies += ["studies.tiny_llama.guard_demo", "studies.fault_lab.rescue.demo"]
    done = run(bare, "-c", HELP, ",".join(studies))
    assert done.returncode == 0, done.stderr


def test_what_a_command_lacks_is_one_line_with_the_command_that_installs_it(bare, tmp_path):
    done = run(bare, "-m", "rmetric", "supervise", str(tmp_path / "run"), "--", "true")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert 'needs psutil, which is not installed: pip install "rmetric[guard]"' in done.stderr
    assert not (tmp_path / "run").exists()
    (tmp_path / "job.log").write_text("step 1\n")
    without = bare | {"WITHOUT": "dtaidistance"}
    done = run(without, "-m", "rmetric", "diagnose", "job.log", folder=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("error: rmetric diagnose needs dtaidistance: pip install")
    (tmp_path / "log.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd" * 8)
    (tmp_path / "events.out.tfevents.1.a").write_bytes(
        b"\x18" + bytes(11) + b"\x1a\x0dbrain.Event:2" + bytes(9)
    )
    done = run(bare, "-m", "rmetric", "replay", *map(str, tmp_path.iterdir()), folder=tmp_path)
    assert "Traceback" not in done.stderr
    for package in ("zstandard", "tensorboard"):
        assert f"pip install {package}" in done.stderr, done.stderr
