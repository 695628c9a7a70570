import os


# One of several processes, and what it starts, leaves the other cores to the others.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Triton, where it is installed, runs kernels on a CPU only if it is told so before anything imports it.
os.environ.setdefault("TRITON_INTERPRET", "0" if os.path.exists("/dev/nvidiactl") else "1")

import pytest
import torch
from goldens import Golden

import lilicorr_hf


THREADS = torch.get_num_threads()
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
    """The shipped pair on its real target, fetched on first use, and all threads: model, tokenizer, assistant."""
    torch.set_num_threads(THREADS)
    yield smollm2_pair
    torch.set_num_threads(1)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
