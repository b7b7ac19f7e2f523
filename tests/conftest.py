import gc
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import HealthCheck, settings

from rmetric._util import background

# No verdict may hang on how busy the machine is, nor on chance: the same examples each time.
background.CLOSE_SECONDS = 120.0
COMMON = dict(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("rmetric", max_examples=15, derandomize=True, **COMMON)
#: HYPOTHESIS_PROFILE=slow is what CI takes; =thorough looks for new examples, ten times as long.
settings.register_profile("slow", max_examples=50, derandomize=True, **COMMON)
settings.register_profile("thorough", max_examples=500, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "rmetric"))

# Hundreds of programs are started: without this each compiles the library again, where the
# environment keeps Python from writing what it compiled.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Programs that tests start find the studies, which are not installed.
ROOT = Path(__file__).resolve().parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
)

#: Tests about a study: `tasks.py test --all` and CI run them, the default does not.
OF_STUDIES = (ROOT / "studies", ROOT / "tests" / "studies")

#: Mark -> the seconds from which a test has it.
MARKS = {"slow": 16.0, "long": 0.35}
#: Test function -> its seconds, on average over its parameters, where these give it a mark.
DURATIONS = ROOT / "tests" / "durations.csv"
_, *LINES = DURATIONS.read_text(encoding="utf-8").splitlines()
SECONDS = {test: float(seconds) for test, seconds in (line.split(",") for line in LINES)}


def mark_of(seconds: float) -> str | None:
    return next((mark for mark, least in MARKS.items() if seconds >= least), None)


def of_study(path: Path) -> bool:
    return any(folder in path.parents for folder in OF_STUDIES)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file for its doctests that has none, or whose tests are all left out."""
    if collection_path.suffix != ".py":
        return None
    of_tests = ROOT / "tests" in collection_path.parents
    if of_tests and not collection_path.name.startswith(("test_", "conftest", "__init__")):
        return True
    left_out = "not studies" in config.option.markexpr and of_study(collection_path)
    return True if left_out else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if of_study(item.path):
            item.add_marker(pytest.mark.studies)
        if mark := mark_of(SECONDS.get(item.nodeid.partition("[")[0], 0.0)):
            item.add_marker(mark)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", action="store_true", help="write tests/durations.csv of what runs")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("times", default=False):
        config.pluginmanager.register(Durations())


class Durations:
    """Measures what each test takes; a shared fixture counts for each test that uses it."""

    def __init__(self) -> None:
        self.of_function, self.of_fixture = defaultdict(list), defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        began = time.perf_counter()
        made = yield
        seconds = time.perf_counter() - began
        self.of_fixture[fixturedef.argname] = seconds if fixturedef.scope != "function" else 0.0
        return made

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item):
        began = time.perf_counter()
        yield
        shared = sum(self.of_fixture[name] for name in item.fixturenames)
        item.user_properties.append(("setup", max(shared, time.perf_counter() - began)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            seconds = dict(report.user_properties)["setup"] + report.duration
            self.of_function[report.nodeid.partition("[")[0]].append(seconds)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the times; the line of a test that did not run, or did not pass, stays."""
        found = SECONDS | {test: mean(times) for test, times in self.of_function.items()}
        lines = sorted(f"{test},{s:.2f}\n" for test, s in found.items() if mark_of(s))
        if not hasattr(session.config, "workerinput"):
            DURATIONS.write_text("".join(["test,seconds\n", *lines]), encoding="utf-8")


@pytest.fixture
def start():
    """Start programs as a terminal does, each in a session of its own; they end with the test.

    Where the tests run in the background SIGINT is ignored, and a child inherits that.
    """
    children = []

    def start_child(command, **options) -> subprocess.Popen:
        child = subprocess.Popen(
            command, start_new_session=True, **options,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        children.append(child)
        return child

    yield start_child
    for child in children:
        with suppress(ProcessLookupError):  # also those that it started and left
            os.killpg(child.pid, signal.SIGKILL)
        with child:
            pass  # its pipes are closed, and it is reaped


def pytest_collection_finish() -> None:
    """Leave what the imports made out of every later collection of garbage.

    With torch and transformers loaded a full collection takes a second, and a Trainer asks for
    one at the end of each training.
    """
    gc.collect()
    gc.freeze()
