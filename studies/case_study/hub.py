"""Whether a model or dataset that is named, and not local, can be had at all."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, constants, scan_cache_dir
from huggingface_hub.errors import (
    CacheNotFound,
    GatedRepoError,
    RepositoryNotFoundError,
)

from studies.case_study.settings import CaseStudyError

PATIENCE = 5.0  # seconds that the hub has to answer
WITHOUT_NETWORK = (
    "without a network --tiny trains a small model on bundled text, and --model PATH and "
    "--dataset PATH take local folders and files"
)


def is_local(source: str) -> bool:
    """Whether a file or folder is meant: one that exists, or is written like a path."""
    return Path(source).exists() or source.startswith((".", "/", "~")) or source.count("/") != 1


def check_available(name: str, kind: str) -> None:
    """Fail at once where the `kind` (model or dataset) `name` is neither cached nor on the hub.

    The loaders themselves would try again and again for minutes.
    """
    if name in _cached(kind):
        return
    if constants.HF_HUB_OFFLINE:
        raise CaseStudyError(
            f"{kind} {name} is not on this machine, and HF_HUB_OFFLINE forbids to fetch it; "
            f"{WITHOUT_NETWORK}"
        )
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=PATIENCE)
    except GatedRepoError:
        raise CaseStudyError(
            f"{kind} {name} asks for its terms to be accepted on its page, and for a login"
        ) from None
    except RepositoryNotFoundError:
        raise CaseStudyError(
            f"the hub has no {kind} {name}, or it is private; --{kind} also takes a local path"
        ) from None
    except Exception as error:
        # Every way in which a network can be missing has its own exception.
        raise CaseStudyError(
            f"{kind} {name} is not on this machine and the hub does not answer "
            f"({type(error).__name__}); {WITHOUT_NETWORK}"
        ) from None


def _cached(kind: str) -> set[str]:
    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return set()
    return {repo.repo_id for repo in repositories if repo.repo_type == kind and repo.nb_files > 1}
