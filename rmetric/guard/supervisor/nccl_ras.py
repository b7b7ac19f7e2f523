"""Ask the RAS service of NCCL (2.24 and newer) for the ranks that hold up the others.

Each process with a communicator listens on `NCCL_RAS_ADDR`, and any of them answers for the whole
job, in the text that ``ncclras -v`` prints. The counts differ in healthy jobs too, but not where
one has been standing still for long.
"""

from __future__ import annotations

import re
import socket
import time
from collections import Counter
from collections.abc import Collection

from rmetric.guard.run_folder import Heartbeat

#: Where NCCL listens unless `NCCL_RAS_ADDR` is set.
ADDRESS = "localhost:28028"
#: Seconds for all of it, those in which NCCL collects what it can reach, and those for a greeting.
ASK_SECONDS, COLLECT_SECONDS, GREETING_SECONDS = 10.0, 2, 1.0
MAX_BYTES = 1 << 26
_SECTION = re.compile(r"(?:#\S+ \(\w+\) )?(INCOMPLETE|DEAD|ERROR|MISMATCH|TIMEOUT)$")
_COUNTS = re.compile(r" +Communicator ranks have different (.+) operation counts$")
_LAUNCHED = re.compile(
    r" +(?:\d+ ranks have|Rank \d+ has) (?:launched up to operation (\d+)|not launched any operat)"
)
_PROCESS = re.compile(r" +(?:Rank \d+ .*managed by process|Process) ((\d+) on node \S+)")
_MISSING = {"INCOMPLETE": "does not answer", "DEAD": "is considered dead"}


def ask(address: str, seconds: float = ASK_SECONDS) -> str:
    """The state of the job of the processes that listen there; empty where none answers in time.

    All processes of a node share the port, also one that is stopped: the query is repeated then.
    """
    host, _, port = address.rpartition(":")
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), left) as link:
                link.settimeout(min(left, GREETING_SECONDS))
                link.sendall(b"CLIENT PROTOCOL 2\n")
                if not link.recv(256).startswith(b"SERVER PROTOCOL"):
                    return ""
                link.sendall(b"TIMEOUT %d\nVERBOSE STATUS\n" % COLLECT_SECONDS)
                reply = bytearray()
                while len(reply) < MAX_BYTES:
                    link.settimeout(max(0.01, until - time.monotonic()))
                    if not (part := link.recv(1 << 16)):
                        break
                    reply += part
                return reply.removeprefix(b"OK\n").decode("utf-8", "replace")
        except TimeoutError:
            continue
        except (OSError, ValueError):
            return ""
    return ""


def findings(reply: str, beats: Collection[Heartbeat]) -> list[str]:
    """A line about each process that does not answer, or has launched fewer operations than most.

    Ranks in the reply are those of a communicator, so a rank of the job is known by its process.
    """
    many = Counter(beat.pid for beat in beats)
    ranks = {str(beat.pid): beat.rank for beat in beats if many[beat.pid] == 1}
    found: dict[tuple[str, bool], str] = {}
    section = operation = ""
    most = launched = 0
    for line in reply.splitlines():
        if heading := _SECTION.match(line):
            section, operation = heading[1], ""
        elif counts := _COUNTS.match(line):
            operation, most = counts[1], -1
        if count := _LAUNCHED.match(line):
            launched = int(count[1] or 0)
            most = launched if most < 0 else most  # those of most ranks come first
        if process := _PROCESS.match(line):
            what = _MISSING.get(section, "")
            if not what and operation and launched < most:
                what = f"has launched {launched} {operation} operations, most ranks {most}"
            if what:
                rank = ranks.get(process[2])
                name = f"process {process[1]}"
                name = name if rank is None else f"rank {rank} ({name})"
                found.setdefault((process[1], section in _MISSING), f"NCCL RAS: {name} {what}")
    return list(found.values())
