import logging

import pytest

from rmetric.guard.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path)


@pytest.fixture
def refused(capsys):
    """The error of a command that ends with 2."""

    def error_of(command, *arguments):
        from tests.cli.test_exit_codes import code_of  # imports the diagnosis

        assert code_of(f"rmetric {command}", *map(str, arguments)) == 2
        return capsys.readouterr().err

    return error_of


@pytest.fixture
def errors(caplog):
    """The log, of which no warning counts."""
    caplog.set_level(logging.ERROR, logger="rmetric")
    return caplog
