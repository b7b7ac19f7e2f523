"""torchrun in a process that has imported torch before it is needed: script of the spare launcher.

    python warm_launcher.py [MODULE,MODULE,...]

It imports the modules, prints `ready` and waits for one line of JSON on standard input:
`arguments` of torchrun, `environment`, `log` for the output, the number of `ranks`, and the
`command` of a plain start. It then runs torchrun. Without modules torchrun starts the ranks as
ever. With modules the ranks are forked before that, with nothing but the imports: no thread, socket
or device of the launcher. Each is in a session of its own, and runs its script as `__main__` as
Python does. If anything prevents this before the first rank, the process replaces itself by the
plain command. Ranks that torchrun itself restarts are started plainly.

Run by path, not imported, with standard library and torch alone: the training's Python need not
have this package.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any, NoReturn

OUTPUT_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW


def main() -> None:
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path.pop(0)  # the folder of this file
    torchrun = importlib.import_module("torch.distributed.run")
    modules = list(filter(None, sys.argv[1].split(",")))
    for name in modules:
        importlib.import_module(name)
    print("ready", flush=True)
    line = sys.stdin.readline()
    if not line:  # the supervisor has ended
        return
    launch = json.loads(line)
    output = os.open(launch["log"], OUTPUT_FLAGS, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    for source in (null, output):
        os.close(source)
    os.environ.update(launch["environment"])
    try:
        check_no_device()
        run = forking(launch["ranks"]) if modules else torchrun.main
    except Exception as error:
        print(f"warm start impossible ({error!r}): plain start", file=sys.stderr, flush=True)
        os.execvpe(launch["command"][0], launch["command"], os.environ)
    sys.argv = launch["command"][:1] + launch["arguments"]
    run(launch["arguments"])


def check_no_device() -> None:
    """Raise RuntimeError if a device is in use, which a fork does not survive."""
    torch = sys.modules["torch"]
    opened = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            opened.append(str(descriptor.readlink()))
    used = [name for name in opened if name.startswith(("/dev/nvidia", "/dev/kfd"))]
    if used or torch.cuda.is_initialized():
        raise RuntimeError(f"an import has initialised a device: {used}")


class ForkedRank:
    """A process that waits to become a rank; the part of `subprocess.Popen` that torchrun uses.

    It ends with the launcher: `earlier` are those whose pipes it must not keep open.
    """

    def __init__(self, earlier: list[ForkedRank]) -> None:
        self.args: tuple[str, ...] = ()
        self.returncode: int | None = None
        reading, self._writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            for writing in (self._writing, *(rank._writing for rank in earlier)):
                os.close(writing)
            become_rank(reading)
        os.close(reading)

    def start(self, args: tuple[str, ...], environment: dict[str, str], *files: Any) -> ForkedRank:
        """Run `args` with standard output and error in these files, None: as the launcher's.

        Raises OSError if the process has ended.
        """
        self.args = args
        outputs = [file and str(Path(file.name).absolute()) for file in files]
        request = {"arguments": args[2:], "environment": environment, "outputs": outputs}
        with os.fdopen(self._writing, "w") as pipe:
            pipe.write(json.dumps(request | {"folder": str(Path.cwd())}) + "\n")
        return self

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def forking(ranks: int) -> Any:
    """Fork so many ranks and make torchrun take them; returns its `main`."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    waiting: list[ForkedRank] = []
    for _ in range(ranks):
        waiting.append(ForkedRank(waiting))
    plain = subprocess_handler.SubprocessHandler._popen

    def popen(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
        if waiting and args[:2] == (sys.executable, "-u"):
            with contextlib.suppress(OSError):  # it has ended
                return waiting.pop().start(args, env, handler._stdout, handler._stderr)
        return plain(handler, args, env)

    subprocess_handler.SubprocessHandler._popen = popen  # type: ignore
    return run.main


def become_rank(reading: int) -> NoReturn:
    """Wait for the start, run the script or module of a rank and exit as Python does."""
    code = 1
    try:
        with os.fdopen(reading) as pipe:
            line = pipe.readline()
        if not line:  # the launcher has ended
            os._exit(0)
        request = json.loads(line)
        os.setsid()
        for target, path in enumerate(request["outputs"], start=1):
            if path:
                output = os.open(path, os.O_WRONLY | os.O_APPEND)
                os.dup2(output, target)
                os.close(output)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        if "numpy" in sys.modules:  # ranks that start apart draw apart
            sys.modules["numpy"].random.seed()
        run_as_main(request["arguments"])
        code = 0
    except SystemExit as error:
        code = exit_code(error.code)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def run_as_main(arguments: list[str]) -> None:
    """`python SCRIPT ...` or `python -m MODULE ...` in this process."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    if arguments[0] == "-m":
        sys.argv = ["-m", *arguments[2:]]
        sys.path.insert(0, str(Path.cwd()))
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
        return
    script = arguments[0]
    sys.argv = list(arguments)
    sys.path.insert(0, str(Path(script).resolve().parent))
    module.__file__ = script
    with io.open_code(str(Path(script).absolute())) as file:
        code = compile(file.read(), script, "exec")
    module.__dict__["__builtins__"] = __builtins__
    exec(code, module.__dict__)


def exit_code(value: Any) -> int:
    if value is None or isinstance(value, int):
        return (value or 0) & 0xFF
    print(value, file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    main()
