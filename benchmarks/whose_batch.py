"""The picture of docs/concepts/batch.md: one script under both conventions.

    python benchmarks/whose_batch.py

Trains a small network on handwritten digits on 1, 2 and 4 ranks, by `batch="rank"` and
`batch="global"`. Matplotlib is installed into .bench/plot.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".bench" / "plot"
PICTURE = ROOT / "docs" / "concepts" / "batch.png"
RANKS, EPOCHS = (1, 2, 4), 10
CONVENTIONS = ("rank", "global")


def train(batch, path):
    """On each rank: write the validation loss of each epoch."""
    import keras  # noqa: PLC0415 - the launcher and the plot need none of it
    from sklearn.datasets import load_digits  # noqa: PLC0415

    import keras_dist  # noqa: PLC0415

    keras.utils.set_random_seed(0)
    images, labels = load_digits(return_X_y=True)
    layers = [keras.Input((64,)), keras.layers.Dense(64, activation="relu")]
    model = keras.Sequential([*layers, keras.layers.Dense(10, activation="softmax")])
    model.compile(keras.optimizers.SGD(0.2), "sparse_categorical_crossentropy")
    history = keras_dist.dist_fit(
        model,
        images / 16,
        labels,
        validation_split=0.25,
        batch_size=32,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        batch=batch,
    )
    if keras_dist.rank() == 0:
        Path(path).write_text(json.dumps(history.history["val_loss"]))


def measure():
    """The validation loss by convention and number of ranks."""
    found = {}
    for batch in CONVENTIONS:
        for ranks in RANKS:
            path = FOLDER / "whose_batch.json"
            run = [sys.executable, "-m", "keras_dist", "run", "-np", str(ranks)]
            script = [sys.executable, __file__, "train", batch, str(path)]
            subprocess.run([*run, *script], check=True)
            found[f"{batch} {ranks}"] = json.loads(path.read_text())
    return found


def plot(found):
    """A panel for each convention, a line for each number of ranks."""
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for axis, batch in zip(axes, CONVENTIONS, strict=True):
        for ranks, (style, width) in zip(
            RANKS, (("-", 5), ("-", 2.5), (":", 1.8)), strict=True
        ):
            label = f"{ranks} rank{'s' * (ranks > 1)}"
            losses = found[f"{batch} {ranks}"]
            epochs = range(1, EPOCHS + 1)
            axis.plot(epochs, losses, style, linewidth=width, label=label)
        axis.set_title(f'batch="{batch}"', family="monospace", fontsize=11)
        axis.set_xlabel("epoch")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("validation loss")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=130)


def main(arguments):
    """See the usage above."""
    if arguments[:1] == ["train"]:
        return train(*arguments[1:])
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not (FOLDER / "matplotlib").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", FOLDER]
        subprocess.run([*pip, "matplotlib"], check=True)
    if arguments[:1] == ["plot"]:
        return plot(json.loads(arguments[1]))
    env = {**os.environ, "PYTHONPATH": str(FOLDER)}
    command = [sys.executable, __file__, "plot", json.dumps(measure())]
    return subprocess.run(command, check=True, env=env)


if __name__ == "__main__":
    main(sys.argv[1:])
