import os

import pytest
import torch
from goldens import Golden

import lilicorr_hf


# Tiny models are slower on many threads, far slower where something else keeps the cores busy.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def golden():
    return Golden.load


@pytest.fixture(scope="session")
def smollm2():
    """The shipped pair on its real target, fetched on first use: model, tokenizer, assistant."""
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield lilicorr_hf.load_pair("smollm2-135m")
    torch.set_num_threads(threads)
