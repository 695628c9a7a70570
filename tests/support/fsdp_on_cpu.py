"""`python -m lilicorr_hf.training.train` where accelerate takes processes on a CPU for accelerators.

Accelerate shards on accelerators only and runs plain data parallelism elsewhere, without a word; torch's `fully_shard`
itself works on any device.
"""

import sys

from accelerate.state import PartialState
from accelerate.utils import DistributedType

from lilicorr_hf.training import train
from lilicorr_hf.training.trainer import LiLiCorrTrainer


class ShardedTrainer(LiLiCorrTrainer):
    def create_accelerator_and_postprocess(self) -> None:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
        super().create_accelerator_and_postprocess()
        assert self.accelerator.is_fsdp2 and self.accelerator.device.type == "cpu"


if __name__ == "__main__":
    train.LiLiCorrTrainer = ShardedTrainer
    train.main(sys.argv[1:])
