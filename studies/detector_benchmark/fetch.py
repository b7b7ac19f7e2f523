"""Fetch the manifest's public logs: `python -m studies.detector_benchmark.fetch --out real_logs`.

Each file comes from BASE/<repository>/<commit>/<path>, with the commit of the manifest, so the
file is always the same. If the manifest has the published bytes, other bytes are refused and not
kept. Needs pooch (`pip install -e ".[benchmark]"`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from studies.common.command import command_parser, exit_code_of, exit_with, fail
from studies.detector_benchmark.data_sets import sha256
from studies.detector_benchmark.real_logs import MANIFEST, Listed, read_manifest

BASE_URL = "https://raw.githubusercontent.com"


class Fetched(NamedTuple):
    """Result of one download; `problem` is empty if the file is present and correct."""

    file: str
    path: Path
    problem: str = ""
    note: str = ""


def url_of(line: Listed, base_url: str = BASE_URL) -> str:
    """URL of the published file.

    >>> from types import SimpleNamespace as Line
    >>> url_of(Line(repository="a/b", commit="c0ffee", path="runs/x y.csv"), "http://host")
    'http://host/a/b/c0ffee/runs/x%20y.csv'
    """
    return f"{base_url.rstrip('/')}/{line.repository}/{line.commit}/{quote(line.path)}"


def fetch(lines: Sequence[Listed], folder: Path, *, base_url: str = BASE_URL) -> Iterator[Fetched]:
    """Fetch each file once; existing files with the right bytes are kept.

    One that cannot be downloaded, or has other bytes than the manifest's, is yielded with its
    problem. Raises ModuleNotFoundError without pooch.
    """
    import pooch

    pooch.get_logger().setLevel("ERROR")
    downloader = pooch.HTTPDownloader(timeout=30.0)
    folder.mkdir(parents=True, exist_ok=True)
    for line in {line.file: line for line in lines}.values():
        path = folder / line.file
        if path.is_file() and sha256(path) == line.sha256:
            yield Fetched(line.file, path, note="is there")
            continue
        try:
            pooch.retrieve(
                url_of(line, base_url),
                known_hash=f"sha256:{line.sha256}" if line.published_bytes else None,
                fname=line.file,
                path=folder,
                downloader=downloader,
            )
        except (OSError, ValueError) as error:  # requests' are OSErrors, a hash's is a ValueError
            yield Fetched(line.file, path, problem=" ".join(str(error).split()))
            continue
        known = sha256(path) == line.sha256
        note = "" if known else "unchecked: the manifest does not know the published bytes"
        yield Fetched(line.file, path, note=note)


def main(arguments: Sequence[str] | None = None) -> int:
    """0: all files are present; 1: some are not, or cannot be written; 2: nothing was done."""
    parser = command_parser("detector_benchmark.fetch", __doc__)
    parser.add_argument("--out", type=Path, default=Path("real_logs"), metavar="DIR")
    parser.add_argument("--manifest", type=Path, default=MANIFEST, metavar="FILE")
    parser.add_argument("--base-url", default=BASE_URL, metavar="URL", help=f"default: {BASE_URL}")
    options = parser.parse_args(arguments)
    try:
        lines = read_manifest(options.manifest)
        found = []
        for got in fetch(lines, options.out, base_url=options.base_url):
            found.append(got)
            print(f"{got.file}: {got.problem or got.note or 'fetched'}")
    except ModuleNotFoundError:
        return fail("fetching needs pooch: pip install -e '.[benchmark]'")
    except (OSError, ValueError) as error:
        return fail(error, exit_code_of(error))
    failed = sum(bool(got.problem) for got in found)
    print(f"{len(found) - failed} of {len(found)} files are in {options.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    exit_with(main)
