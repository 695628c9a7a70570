"""A trainer of a tiny pair."""

from tiny import tiny_assistant

from lilicorr_hf.training.arguments import LiLiCorrTrainingArguments
from lilicorr_hf.training.data import BlockDataset
from lilicorr_hf.training.trainer import LiLiCorrTrainer


def trainer_for(target, examples, folder, model=None, prompts=None, **changes):
    options = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "max_anchors": 8,
        "learning_rate": 3e-3,
        "head_learning_rate": 3e-3,
        "logging_steps": 1,
        "report_to": "none",
        "bf16": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 0,
    }
    args = LiLiCorrTrainingArguments(**(options | changes))
    data = BlockDataset(examples, args.max_anchors, args.seed)
    model = tiny_assistant() if model is None else model
    return LiLiCorrTrainer(model, target, args, data, prompts, eval_max_new_tokens=25)
