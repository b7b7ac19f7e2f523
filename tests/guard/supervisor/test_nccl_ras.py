"""NCCL's RAS service: a small server that answers in the form of NCCL's documentation and sources.

The real one needs GPUs.
"""

import socket
import threading
from contextlib import contextmanager, suppress

import pytest

from rmetric.cli.main import main
from rmetric.guard.supervisor import nccl_ras
from tests.guard.supervisor import beat
from tests.guard.supervisor.test_stacks import rank

HEAD = """
Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         1       3-4         4         4   RUNNING  INCOMPLETE

Errors
======

"""
UNRESPONSIVE = f"""{HEAD}INCOMPLETE
  Missing communicator data from 1 job process
  Process 102 on node 172.16.64.213 managing GPU 2

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 2 -- GPU 2 managed by process 102 on node 172.16.64.213

Warnings
========

TIMEOUT
  Encountered 2 communication timeouts while gathering communicator data
"""
#: Before 2.26 the operations are not distinguished.
DEAD_AND_BEHIND = f"""{HEAD}DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 7 on node 172.16.64.214 managing GPU 1

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 1

#0-0 (cf264af53edbe986) MISMATCH
  Communicator ranks have different collective operation counts
  5 ranks have launched up to operation 6650
  2 ranks have launched up to operation 6649
  Rank 0 -- GPU 0 managed by process 100 on node 172.16.64.213
  Rank 3 -- GPU 3 managed by process 103 on node 172.16.64.213
"""
#: Rank 2 waits for its data; rank 3 is ahead in another operation.
BEHIND = f"""{HEAD}#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different status
  3 ranks have status RUNNING
  Rank 1 has status FINALIZE -- GPU 1 managed by process 101 on node 172.16.64.213
  Communicator ranks have different AllReduce operation counts
  3 ranks have launched up to operation 42
  Rank 2 has launched up to operation 41 -- GPU 2 managed by process 102 on node 172.16.64.213

  Communicator ranks have different AllGather operation counts
  3 ranks have not launched any operations
  Rank 3 has launched up to operation 1 -- GPU 3 managed by process 103 on node 172.16.64.213
"""
ON = "on node 172.16.64.213)"
OLD = "has launched 6649 collective operations, most ranks 6650"


@pytest.mark.parametrize(
    ("reply", "pids", "findings"),
    [
        (UNRESPONSIVE, (100, 101, 102), [f"rank 2 (process 102 {ON} does not answer"]),
        # Two nodes have a process of that number.
        (UNRESPONSIVE, (100, 102, 102), ["process 102 on node 172.16.64.213 does not answer"]),
        (DEAD_AND_BEHIND, (100, 101, 102, 103),
         ["process 7 on node 172.16.64.214 is considered dead",
          *(f"rank {rank} (process {100 + rank} {ON} {OLD}" for rank in (0, 3))]),
        (BEHIND, (100, 101, 102, 103),
         [f"rank 2 (process 102 {ON} has launched 41 AllReduce operations, most ranks 42"]),
        (HEAD, (100,), []),
    ],
)  # fmt: skip
def test_ranks_that_are_missing_or_behind_are_named(reply, pids, findings):
    beats = [beat(at, 7, pid=pid) for at, pid in enumerate(pids)]
    assert nccl_ras.findings(reply, beats) == [f"NCCL RAS: {finding}" for finding in findings]


@contextmanager
def ras(reply, *, stopped=0, greeting=b"SERVER PROTOCOL 2\n"):
    """A RAS service; a process that is stopped accepts the first connections."""
    received = []

    def serve(server):
        held = [server.accept() for _ in range(stopped)]
        link, _ = server.accept()
        with suppress(OSError), link:
            received.append(link.recv(100))
            link.sendall(greeting)
            received.append(link.recv(100))
            for part in (b"OK\n", reply[:700].encode(), reply[700:].encode()):
                link.sendall(part)
        for connection, _ in held:
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}", received


def test_a_look_asks_saves_the_reply_and_names_the_rank(folder, tmp_path, capsys, monkeypatch):
    pytest.importorskip("drain3")
    monkeypatch.setattr(nccl_ras, "GREETING_SECONDS", 0.3)
    with (
        rank(folder, "time.sleep(600)", 2) as late,
        ras(reply := BEHIND.replace("102", str(late.pid)), stopped=1) as (address, received),
        rank(folder, "time.sleep(600)", 0, NCCL_RAS_ADDR=address),
    ):
        assert main(["stacks", str(tmp_path)]) == 0
    ranks, _, diagnosis = capsys.readouterr().out.partition("\n\n")
    assert f"NCCL RAS: rank 2 (process {late.pid} {ON} has launched 41 AllReduce" in ranks
    assert "NCCL's RAS service names a rank for which others wait, rank 2 on 172." in diagnosis
    assert received == [b"CLIENT PROTOCOL 2\n", b"TIMEOUT 2\nVERBOSE STATUS\n"]
    assert [path.read_text() for path in tmp_path.glob("stacks/1/nccl_ras-*.txt")] == [reply]


def test_where_nothing_answers_in_time_there_is_no_reply():
    for address in ("127.0.0.1:1", "nowhere", "127.0.0.1:none"):
        assert nccl_ras.ask(address, 1.0) == ""
    with ras("", greeting=b"HTTP/1.1 400\n") as (address, _):
        assert nccl_ras.ask(address, 1.0) == ""
    with ras("", stopped=9) as (address, _):
        assert nccl_ras.ask(address, 0.3) == ""
