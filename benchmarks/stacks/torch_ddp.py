"""PyTorch: DistributedDataParallel over Gloo, and beside it no averaging.

Method: "ddp".
"""

import os

import common
import torch
from torch import nn
from torch.nn import functional
from torch_models import make

arguments = common.arguments("ddp")
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
torch.distributed.init_process_group("gloo")
rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()


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
