import os


# One of pytest-xdist's processes, and what it starts, has its share of the cores.
os.environ.setdefault(
    "OMP_NUM_THREADS",
    str(max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))),
)
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
    """The shipped pair on its real target, fetched on first use, and many threads: model, tokenizer, assistant."""
    threads = torch.get_num_threads()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    yield smollm2_pair
    torch.set_num_threads(threads)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
