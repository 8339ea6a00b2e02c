"""PyTorch: DistributedDataParallel over Gloo, and beside it no averaging.

Method: "ddp".
"""

import os

import common
import torch
from torch import nn
from torch.nn import functional

arguments = common.arguments("ddp")
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
torch.distributed.init_process_group("gloo")
rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()


class Block(nn.Module):
    """Two convolutions, each after its activation, around which the input is added."""

    def __init__(self, before, channels):
        super().__init__()
        self.first, self.second = nn.BatchNorm2d(before), nn.BatchNorm2d(channels)
        self.one = nn.Conv2d(before, channels, 3, padding=1, bias=False)
        self.two = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.dropout = nn.Dropout(0.01)
        self.around = None
        if before != channels:
            self.around = nn.Conv2d(before, channels, 1, bias=False)

    def forward(self, x):
        active = functional.relu(self.first(x))
        y = self.dropout(functional.relu(self.second(self.one(active))))
        return self.two(y) + (x if self.around is None else self.around(active))


class Moved(nn.Module):
    """Flips and shifts each image at random, as the example's network does."""

    def forward(self, x):
        if not self.training:
            return x
        flips = torch.randint(0, 2, (len(x),)) * 2.0 - 1
        theta = torch.zeros(len(x), 2, 3)
        theta[:, 0, 0], theta[:, 1, 1] = flips, 1
        theta[:, :, 2] = (torch.rand(len(x), 2) * 2 - 1) * (4 / 28)
        grid = functional.affine_grid(theta, x.shape, align_corners=False)
        return functional.grid_sample(x, grid, mode="nearest", align_corners=False)


def make(name):
    """The same three models as in `keras_models.py`."""
    if name == "cnn":
        return nn.Sequential(
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(1600, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )
    if name == "mlp":
        return nn.Sequential(
            nn.Linear(784, 2048),
            nn.ReLU(),
            nn.Linear(2048, 2048),
            nn.ReLU(),
            nn.Linear(2048, 10),
        )
    return nn.Sequential(
        Moved(),
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        Block(16, 16),
        nn.MaxPool2d(2),
        Block(16, 32),
        nn.MaxPool2d(2),
        Block(32, 64),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def train_epoch(clock, model, sgd, x, y):
    """One epoch, with the loss and the accuracy that Keras has too."""
    torch.distributed.barrier()
    clock.begin()
    loss_sum, correct = 0.0, 0
    for indices in torch.randperm(len(x)).split(common.BATCH_SIZE):
        sgd.zero_grad()
        outputs = model(x[indices])
        loss = functional.cross_entropy(outputs, y[indices])
        loss.backward()
        sgd.step()
        loss_sum += float(loss.detach()) * len(indices)
        correct += int((outputs.argmax(1) == y[indices]).sum())
        clock.step()


for name in arguments.models:
    rows = common.rows_of(name, size, arguments.scale)
    x, y = (torch.from_numpy(array[rank::size].copy()) for array in rows)
    if name not in common.FLAT:
        x = x.permute(0, 3, 1, 2)
    decay = 2e-4 if name == "wide_resnet" else 0.0
    parts = []
    for part in ("own", "twin"):
        torch.manual_seed(0)
        model = make(name)
        if part == "own":
            model = nn.parallel.DistributedDataParallel(model)
        sgd = torch.optim.SGD(
            model.parameters(), 0.01, momentum=0.9, weight_decay=decay
        )
        clock = common.Clock(part, name, common.BATCH_SIZE * size)
        parts.append((clock, model, sgd))
    for _ in range(common.EPOCHS):
        for part in parts:
            train_epoch(*part, x, y)
    for clock, _, _ in parts:
        clock.report()
    torch.distributed.barrier()
os._exit(0)
