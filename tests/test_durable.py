import pytest

from rmetric._util.durable import durable_file


def write(path, *pieces):
    with durable_file(path) as file:
        for piece in pieces:
            file.write(piece)


def test_a_file_is_whole_or_what_it_was(tmp_path):
    path = tmp_path / "file"
    write(path, b"who", b"le")
    with pytest.raises(TypeError):
        write(path, b"half", None)
    assert path.read_bytes() == b"whole"
    assert list(tmp_path.iterdir()) == [path]
