"""The stage of a failure is that of its cause, independent of the writer and of later lines."""

from __future__ import annotations

from rmetric.diagnosis.frames import stage_of


def test_a_launcher_s_own_frames_tell_no_stage() -> None:
    torch = '  File "/lib/torch/{}", line 3, in {}\n'
    launcher = torch.format("distributed/elastic/agent/api.py", "_initialize_workers")
    layers = torch.format("nn/modules/container.py", "__getitem__")
    assert stage_of("Traceback (most recent call last):\n" + launcher + layers) == ""
