"""`lilicorr train` in processes whose clocks run at different speeds."""

import os
import time

from lilicorr_hf.training import budget, train


if __name__ == "__main__":
    speed = 1 + int(os.environ["RANK"])
    budget.CLOCKS["wall"] = lambda: speed * time.perf_counter()
    train.main()
