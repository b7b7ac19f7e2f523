"""The table of exit codes in docs/commands.md holds every command, and what it states is so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from rmetric._util.errors import FAILED, INTERRUPTED, WRONG, exit_code_of, exit_with
from rmetric.cli import COMMANDS, diagnose, supervise, telemetry, watch
from rmetric.cli import main as command_line
from rmetric.detectors.calibrated.thresholds import read_thresholds
from rmetric.diagnosis.report.result import OUTCOMES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
#: Command -> its cells for 0, 1, and 3 and above.
TABLE = {
    row[0].strip("` "): [cell.strip() for cell in row[1:4]]
    for line in PAGE.partition("## Exit codes")[2].splitlines()
    if len(row := line.strip("|").split("|")) == 4 and "`" in row[0]
}
#: Without a parser in this process: they are started.
STARTED = ("tasks.py", "python -m studies.tiny_llama.guard_demo")


def main_of(command: str):
    """The function `main` of a row, and the arguments that choose its subcommand."""
    first, *rest = command.split()
    if first == "rmetric":
        return command_line.main, rest
    if first == "python":
        name = rest[-1]
        package = (ROOT / name.replace(".", "/")).is_dir()
        return import_module(f"{name}.__main__" if package else name).main, []
    return import_module(first.removesuffix(".py")).main, []


def code_of(command: str, *arguments: str) -> int | str | None:
    if command in STARTED:
        words = [sys.executable, *command.removeprefix("python ").split(), *arguments]
        return subprocess.run(words, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=60).returncode
    main, first = main_of(command)
    try:
        return main([*first, *arguments])
    except SystemExit as ended:
        return ended.code


def test_the_table_has_every_command_and_no_other():
    scripts = [
        path
        for path in [*ROOT.glob("*.py"), *(ROOT / "studies").rglob("*.py")]
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    ]
    names = {f"rmetric {name}" for name in COMMANDS}
    for path in scripts:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        names.add(path.name if path.parent == ROOT else f"python -m {module}")
    assert set(TABLE) == names


@pytest.mark.parametrize("command", TABLE)
def test_a_wrong_command_line_is_2(command, capfd):
    assert code_of(command, "--no-such-option") == WRONG == 2
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_the_codes_of_the_table(name):
    words = import_module(f"rmetric.cli.{name}").EXAMPLES
    codes = set(re.findall(r"(?:^|[:;,] )\s*(\d+) +\w", words.partition("exit codes:")[2], re.M))
    row = re.findall(r"(?:^|, )(\d+) ", TABLE[f"rmetric {name}"][2])
    assert codes - {"130", "128"} == {"0", "1", "2", *row} - {"128"}


def test_the_codes_that_only_one_command_has():
    assert diagnose.EXIT_CODES.keys() == OUTCOMES.keys()
    assert diagnose.EXIT_CODES == {"healthy": 0, "failed": 3, "terminated": 4, "unknown": 5}
    assert "3 failed, 4 terminated, 5 unknown" in TABLE["rmetric diagnose"][2]
    assert watch.ALARMED == telemetry.UNWELL == supervise.LOCKED == 3


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("simulator.py", ["--steps", "20", "--out", "DIR"]),
        ("run_modern_experiments.py", ["--limit", "1", "--out", "DIR"]),
        ("replay_and_analyze_logs.py", ["LOG", "--out", "DIR"]),
        ("rmetric replay", ["LOG", "--out", "DIR"]),
        ("rmetric logs", ["learn", "--job", "a", "LOG", "--out", "DIR/a.json"]),
        ("rmetric calibrate", ["LOG", "--out", "DIR/a.json"]),
        ("rmetric supervise", ["DIR", "--gpus", "0", "--", "true"]),
        ("python -m studies.detector_benchmark.fetch", ["--out", "DIR"]),
        ("python -m studies.tiny_llama.guard_demo", ["--out", "DIR"]),
        ("python -m studies.fault_lab.rescue.demo", ["--out", "DIR"]),
    ],
)
def test_an_output_that_cannot_be_written_is_1(command, arguments, tmp_path, capfd):
    log = tmp_path / "log.csv"
    log.write_text("step,loss\n" + "".join(f"{step},2.5\n" for step in range(1, 400)))
    below = str(log / "below")  # of a file: no folder can be made there
    given = [word.replace("LOG", str(log)).replace("DIR", below) for word in arguments]
    assert code_of(command, *given) == FAILED == 1
    errors = capfd.readouterr().err
    assert str(log) in errors
    assert "Traceback" not in errors
    assert re.search("cannot be written|or written|as `rmetric", TABLE[command][1])


@pytest.mark.parametrize(
    ("special", "problem"),
    [
        ("pipe", "pipe: a named pipe; files and folders of a disk are accepted"),
        ("/dev/zero", "/dev/zero: a device"),
        ("/proc/self", "/proc/self: in a file system of the kernel"),
        ("", "the path is empty"),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        "replay SPECIAL",
        "watch SPECIAL",
        "calibrate SPECIAL",
        "diagnose SPECIAL",
        "diagnose a.log --healthy SPECIAL",
        "diagnose a.log --pool SPECIAL",
        "diagnose a.log --signatures SPECIAL",
        "diagnose a.log --page p.html --metrics SPECIAL",
        "diagnose a.log --page p.html --telemetry SPECIAL",
        "logs learn --job a SPECIAL",
        "telemetry --play SPECIAL",
        "telemetry --run SPECIAL",
        "plan --nodes 8 --batch 8 --model SPECIAL",
        "supervise SPECIAL -- true",
        "supervise run --batch 8 --model SPECIAL -- true",
        "supervise run --watch-log SPECIAL -- true",
        "save SPECIAL",
    ],
)
def test_special_files_and_empty_paths_are_2_at_once(
    command, special, problem, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("a.log").write_text("step 1 loss 2.5\n")
    words = [special if word == "SPECIAL" else word for word in command.split()]
    assert code_of("rmetric", *words) == WRONG
    assert problem in capfd.readouterr().err.splitlines()[-1]


def test_links_to_special_files_are_left_out_of_a_folder(tmp_path, capfd):
    (tmp_path / "a.log").write_text("step 1 loss 2.5\n")
    (tmp_path / "maps.log").symlink_to("/proc/self/maps")
    (tmp_path / "process").symlink_to("/proc/self")
    assert code_of("rmetric diagnose", str(tmp_path), "--json") == 5
    assert "in a file system of the kernel" in capfd.readouterr().out
    assert code_of("rmetric replay", str(tmp_path), "--out", str(tmp_path / "out")) == FAILED
    assert "maps.log: in a file system of the kernel" in capfd.readouterr().err
    with pytest.raises(ValueError, match=r"/dev/zero: a device"):
        read_thresholds(Path("/dev/zero"))


def test_errors_have_one_code_each():
    assert exit_code_of(NotADirectoryError()) == exit_code_of(PermissionError()) == FAILED
    assert exit_code_of(FileNotFoundError()) == exit_code_of(ValueError()) == WRONG


#: Sends Ctrl-C where a module is looked for.
INTERRUPT = (
    "import builtins, os, runpy, signal, sys\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "find = type('', (), {{'find_spec': staticmethod(lambda name, *_: "
    "os.kill(os.getpid(), signal.SIGINT) if name == '{}' else None)}})\n"
    "sys.meta_path.insert(0, find)\n"
    "sys.path.insert(0, '')\n"
)


@pytest.mark.parametrize(
    ("command", "module"),
    [
        *(("rmetric", module) for module in ("rmetric.cli.main", "rmetric.cli.replay", "numpy")),
        ("simulator", "rmetric.simulation"),
        ("run_modern_experiments", "rmetric.simulation.study"),
        ("generate_all_figures", "matplotlib"),
        ("generate_paper_tables", "rmetric.evaluation"),
        ("replay_and_analyze_logs", "rmetric.cli.replay"),
        ("run_case_study", "studies.case_study.settings"),
    ],
)
def test_ctrl_c_during_the_imports_is_130_without_a_traceback(command, module):
    """An import of numpy that is broken off may crash the process."""
    run = f"runpy.run_path('{command}.py', run_name='__main__')"
    if command == "rmetric":
        run = (
            "sys.argv[1:] = ['replay', 'absent.log']\nrunpy.run_module('rmetric', None, '__main__')"
        )
    code = INTERRUPT.format(module) + run
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, b"")


def test_ctrl_c_is_130(capsys):
    def interrupted() -> int:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        exit_with(interrupted)
    assert ended.value.code == INTERRUPTED == 130
    assert capsys.readouterr().err == "stopped\n"
