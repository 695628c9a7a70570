"""`lilicorr train` with the command line of the settings, a step at a time."""

from worker import Parent, Turns, mark, output_head_stage, read_settings

from lilicorr_hf.training import train
from lilicorr_hf.training.trainer import LiLiCorrTrainer


TERMS = ("dflash", "cross_entropy", "distractor")


class Worker(LiLiCorrTrainer):
    """`LiLiCorrTrainer` whose steps are the parent's turns."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.turns = Turns(PARENT)
        self.add_callback(self.turns)
        mark(self, "compute_loss", "lm_head and loss")
        mark(self.target.base_model, "forward", "target")
        mark(self.target.get_output_embeddings(), "forward", output_head_stage)
        mark(self.model, "forward", "drafter")
        mark(self.model.lilicorr, "forward", "head")

    def create_optimizer(self, model=None):
        optimizer = super().create_optimizer(model)
        mark(optimizer, "step", "optimizer")
        return optimizer

    def note(self, step, batch):
        super().note(step, batch)
        self.turns.report = {
            "tokens": batch.input_ids.numel(),
            "blocks": batch.keep.sum().item(),
            "loss": step.loss.item(),
            "terms": {name: step.parts[name].item() for name in TERMS},
        }


if __name__ == "__main__":
    PARENT = Parent()
    train.LiLiCorrTrainer = Worker  # type: ignore[misc]
    train.main(read_settings()["argv"])
