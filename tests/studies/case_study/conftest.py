from pathlib import Path

import datasets
import pytest
import torch

from tests.studies.case_study.runs import write_examples, write_mini_model


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Nothing of the tests is kept where the datasets of the user are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Sums must come in one order, and a model this small gains nothing from two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    return write_mini_model(tmp_path_factory.mktemp("mini") / "model")


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> Path:
    return write_examples(tmp_path_factory.mktemp("data") / "questions.jsonl", 120)
