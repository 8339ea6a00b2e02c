"""A training that Weights & Biases logs offline, by two ranks or by plain Keras.

python tests/trackers/logs_wandb.py FOLDER [plain]
"""

import sys
from pathlib import Path

import wandb
from small import train
from wandb.integration.keras import WandbMetricsLogger, WandbModelCheckpoint

import keras_dist

if __name__ == "__main__":
    mode = "offline" if keras_dist.rank() == 0 else "disabled"
    with wandb.init(mode=mode, dir=sys.argv[1], project="small"):
        checkpoint = Path(sys.argv[1]) / "best.keras"
        train([WandbMetricsLogger(), WandbModelCheckpoint(checkpoint)])
