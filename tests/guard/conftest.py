import logging

import pytest

from rmetric.cli.main import main
from rmetric.guard.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path)


@pytest.fixture
def refused(capsys):
    """What a command says that ends with 2."""

    def error_of(*arguments):
        try:
            code = main(list(map(str, arguments)))
        except SystemExit as ended:
            code = ended.code
        assert code == 2
        return capsys.readouterr().err

    return error_of


@pytest.fixture
def errors(caplog):
    """The log, of which no warning counts."""
    caplog.set_level(logging.ERROR, logger="rmetric")
    return caplog
