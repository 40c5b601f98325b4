"""Write a loss: LINEX, for forecasts where too little costs far more than too much.

With d = y_pred - y_true the loss is exp(a d) - a d - 1 (Varian 1975; Zellner 1986). At the minimum
its derivative with respect to a bias is 0, hence mean(exp(a d)) = 1, which the example checks. For
Gaussian noise of deviation s the best forecast is -a s^2 / 2 above the mean.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
from models import dense

import onnxfit
from onnxfit.losses import Loss


@dataclass(frozen=True)
class Linex(Loss):
    """LINEX loss exp(a d) - a d - 1 of each element; `a` < 0 punishes forecasts that are too low."""

    a: float = -1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.a == 0:
            raise onnxfit.errors.SettingError("Linex needs a != 0.")

    def __call__(
        self, op: onnxfit.GraphBuilder, y_true: onnxfit.Value, y_pred: onnxfit.Value
    ) -> onnxfit.Value:
        scaled = self.a * (y_pred - y_true)
        return op.Exp(scaled) - scaled - 1


def main() -> None:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((2000, 3)).astype(np.float32)
    demand = (X @ np.array([2.0, -1.0, 0.5]) + 10 + 0.5 * rng.standard_normal(2000)).astype(
        np.float32
    )

    loss = Linex(a=-2.0)
    trainer = onnxfit.Trainer(dense(3, 1), loss="mse", optimizer=onnxfit.optimizers.SGD(0.2))
    trainer.fit(X, demand, batch_size=len(X), epochs=60, verbose=0)
    start = trainer.export(None)  # exp grows fast, so begin at the forecast of the mean

    trainer = onnxfit.Trainer(start, loss=loss, optimizer=onnxfit.optimizers.SGD(0.1))
    trainer.fit(X, demand, batch_size=len(X), epochs=200, verbose=0)

    d = trainer.predict(X)[:, 0].astype(np.float64) - demand
    condition = float(np.mean(np.exp(loss.a * d)))
    print(
        f"forecast above the mean by  {d.mean():.3f}   (0.25 for Gaussian noise of deviation 0.5)"
    )
    print(f"mean(exp(a d))              {condition:.5f} (1 where the loss is smallest)")
    if not (abs(condition - 1) < 1e-3 and abs(d.mean() - 0.25) < 0.03):
        sys.exit("custom_loss: training did not arrive at the minimum")


if __name__ == "__main__":
    main()
