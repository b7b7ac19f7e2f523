"""torchrun in a process that has imported torch before it is needed. Run by path, not imported.

    python warm_launcher.py [MODULE,MODULE,...]

It imports the modules, prints `ready` and waits for one line of JSON on standard input:
`arguments` of torchrun, `environment`, `log` for the output, and the `command` of a plain
start. It then runs torchrun. Without modules torchrun starts the ranks as ever. With modules
the ranks are forked from a server process that has nothing but
the imports: no thread, socket or device of the launcher. A rank is a child of the launcher, in
a session of its own, and runs its script as `__main__` as Python does. If anything prevents
this before the first rank, the process replaces itself by the plain command.

Standard library and torch alone: the training's Python need not have this package.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any, NoReturn

PR_SET_CHILD_SUBREAPER = 36
OUTPUT_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW


def main() -> None:
    """Import, wait for the launch, run it."""
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
        run = ForkServer().install() if modules else torchrun.main
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


class ForkedProcess:
    """The part of `subprocess.Popen` that torchrun uses, for a rank of the fork server."""

    def __init__(self, pid: int, args: Any) -> None:
        self.pid, self.args = pid, args
        self.returncode: int | None = None

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


class ForkServer:
    """Server process, forked while there is one thread, from which the ranks are forked.

    A rank is forked twice; when the process between ends, the kernel makes it a child of the
    launcher, which is marked to adopt orphans and so gets its exit code or signal.
    """

    def __init__(self) -> None:
        if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError("the launcher cannot adopt the ranks")
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            try:
                self._socket.close()
                serve(other)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:  # the launcher's part of the program must not run here, too
                os._exit(1)
        other.close()

    def install(self) -> Any:
        """Make torchrun fork its ranks here; returns its `main`."""
        from torch.distributed import run
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        plain = subprocess_handler.SubprocessHandler._popen

        def popen(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
            if args[:2] == (sys.executable, "-u"):
                with contextlib.suppress(OSError, ValueError):  # the server has ended
                    return self.start(args, env, handler._stdout, handler._stderr)
            return plain(handler, args, env)

        subprocess_handler.SubprocessHandler._popen = popen  # type: ignore
        return run.main

    def start(
        self, args: tuple[str, ...], env: dict[str, str], stdout: Any, stderr: Any
    ) -> ForkedProcess:
        """Fork a rank. Raises OSError or ValueError if the server has ended."""
        request = json.dumps({"arguments": args[2:], "environment": env, "folder": str(Path.cwd())})
        outputs = [file.fileno() if file else n for n, file in ((1, stdout), (2, stderr))]
        # A packet has an upper limit, which an environment may exceed: the text goes by a file.
        with os.fdopen(os.memfd_create("launch"), "w+") as text:
            text.write(request)
            text.flush()
            socket.send_fds(self._socket, [b"start"], [text.fileno(), *outputs])
        return ForkedProcess(int(self._socket.recv(64)), args)


def serve(connection: socket.socket) -> NoReturn:
    """Loop of the server process; ends with the launcher."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, 64, 3)
        if not message:
            os._exit(0)
        text, *outputs = descriptors
        with os.fdopen(text, "r") as file:
            file.seek(0)
            request = json.load(file)
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            rank = os.fork()
            if rank:
                os.write(writing, str(rank).encode())
                os._exit(0)
            connection.close()
            os.close(reading)
            os.close(writing)
            become_rank(request, outputs)
        os.close(writing)  # so that the end of the process between ends the read
        os.waitpid(between, 0)
        connection.send(os.read(reading, 64))
        for descriptor in (reading, *outputs):
            os.close(descriptor)


def become_rank(request: dict[str, Any], outputs: list[int]) -> NoReturn:
    """Run the script or module of a rank and exit as Python does."""
    code = 1
    try:
        os.setsid()
        for target, descriptor in enumerate(outputs, start=1):
            os.dup2(descriptor, target)
            os.close(descriptor)
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
    """Exit code of `sys.exit(value)`."""
    if value is None or isinstance(value, int):
        return (value or 0) & 0xFF
    print(value, file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    main()
