import os


# Triton, where it is installed, runs kernels on a CPU only if it is told so before anything imports it.
os.environ.setdefault("TRITON_INTERPRET", "0" if os.path.exists("/dev/nvidiactl") else "1")

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
def smollm2_pair():
    return lilicorr_hf.load_pair("smollm2-135m")


@pytest.fixture
def smollm2(smollm2_pair):
    """The shipped pair on its real target, fetched on first use, and every core: model, tokenizer, assistant."""
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield smollm2_pair
    torch.set_num_threads(threads)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
