"""Models of Lightning that keep what they were trained on."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch


class NamesModel(pl.LightningModule):  # type: ignore[misc]
    """A model that keeps the names of the samples that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.seen: dict[str, list[str]] = {"fit": [], "validate": [], "predict": []}

    def look(self, stage: str, loaded: Any) -> torch.Tensor:
        batch = loaded[0] if isinstance(loaded, (list, tuple)) else loaded
        self.seen[stage] += list(batch["name"])
        assert [f"n{int(row[0])}" for row in batch["x"]] == list(batch["name"])
        return self.layer(batch["x"]).square().mean()  # type: ignore[no-any-return]

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = self.look("fit", batch)
        self.log("loss", loss, batch_size=4)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("validation loss", self.look("validate", batch), batch_size=4)

    def predict_step(self, batch: Any, number: int) -> Any:
        return self.look("predict", batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


class ValidatedModel(NamesModel):
    """A model that counts Lightning's validations and the steps of a schedule by epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.num_validations = 0

    def on_validation_end(self) -> None:
        self.num_validations += 1

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class BatchesModel(pl.LightningModule):  # type: ignore[misc]
    """A model that keeps what it was trained on; with `has_schedule`, it asks for the number of steps, as for OneCycleLR."""

    def __init__(self, has_schedule: bool = False) -> None:
        super().__init__()
        self.layer, self.has_schedule = torch.nn.Linear(4, 1), has_schedule
        self.seen: list[Any] = []

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        x = batch["x"] if isinstance(batch, dict) else batch[0]["x"]
        self.seen.append(x[:, 0].int().tolist())
        return self.layer(x).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 1e-6)
        if not self.has_schedule:
            return optimizer
        total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-5, total_steps=int(total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Killed(Exception):
    pass


class KilledModel(BatchesModel):
    stop = -1

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        if len(self.seen) == self.stop:
            raise Killed
        return super().training_step(batch, number)

    def validation_step(self, batch: Any, number: int) -> None:
        pass
