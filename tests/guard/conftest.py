import logging

import pytest

from rmetric.guard.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path)


@pytest.fixture
def errors(caplog):
    """The log, of which no warning counts."""
    caplog.set_level(logging.ERROR, logger="rmetric")
    return caplog
