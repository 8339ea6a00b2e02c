"""The rows of `resumable` in batches of six, made by the libraries."""

import datasets
import grain
import numpy as np
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

datasets.disable_progress_bars()


class Pairs:
    """Batches of a Hugging Face dataset as Keras takes them, and their state."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return ((batch["x"], batch["y"]) for batch in self.batches)

    def state_dict(self):
        return self.batches.state_dict()

    def load_state_dict(self, state):
        self.batches.load_state_dict(state)


def hugging_face(x, y):
    """Rows that are streamed, from three shards."""
    rows = datasets.Dataset.from_dict({"x": x, "y": y}).with_format("numpy")
    return Pairs(rows.to_iterable_dataset(num_shards=3).batch(6))


def hugging_face_shuffled(x, y):
    """With a buffer that shuffles: its rows are not in the state."""

    def rows():
        for own in zip(x, y, strict=True):
            yield dict(zip("xy", own, strict=True))

    shuffled = datasets.IterableDataset.from_generator(rows).shuffle(
        seed=1, buffer_size=20
    )
    return Pairs(shuffled.batch(6).with_format("numpy"))


def grain_map(x, y):
    """A `MapDataset`, which reads ahead."""
    rows = grain.MapDataset.source(range(len(x))).shuffle(seed=1)
    return rows.map(lambda row: (x[row], y[row])).batch(6)


def grain_iter(x, y):
    """An `IterDataset`."""
    return grain_map(x, y).to_iter_dataset()


class Rows(grain.transforms.Map):
    """The row of a number."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def map(self, row):
        return self.x[row], self.y[row]


def grain_loader(x, y):
    """A `DataLoader`, which shuffles."""
    return grain.DataLoader(
        data_source=np.arange(len(x)),
        sampler=grain.samplers.IndexSampler(len(x), shuffle=True, seed=3, num_epochs=1),
        operations=[Rows(x, y), grain.transforms.Batch(6)],
    )


def torchdata_loader(x, y, **options):
    """A `StatefulDataLoader`, which shuffles."""
    torch.manual_seed(3)
    rows = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    return StatefulDataLoader(rows, batch_size=6, shuffle=True, **options)


def torchdata_workers(x, y):
    """The same, with two processes that read ahead."""
    return torchdata_loader(x, y, num_workers=2)
