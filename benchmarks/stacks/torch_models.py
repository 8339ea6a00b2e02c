"""The three models of `keras_models.py` in PyTorch."""

import torch
from torch import nn
from torch.nn import functional


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
    """A model that ends in ten numbers, without a softmax."""
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
