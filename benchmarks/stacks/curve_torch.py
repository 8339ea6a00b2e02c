"""PyTorch DDP as its tutorials show it; the first process validates after each epoch.

A process normalizes by its own part of a batch, and draws its own noise. Method: "ddp".
"""

import os

import curve_data
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torch_models import make

arguments = curve_data.arguments("ddp")
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
torch.distributed.init_process_group("gloo")
rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()

x, y, x_val, y_val = map(torch.from_numpy, curve_data.load(arguments.data))
mean, deviation = x.mean(), x.std()
x, x_val = (((each - mean) / deviation).permute(0, 3, 1, 2) for each in (x, x_val))
rows = TensorDataset(x, y)


def validate(network: nn.Module) -> tuple[float, float]:
    """Loss and accuracy of the validation rows."""
    network.eval()
    with torch.no_grad():
        outputs = torch.cat([network(part) for part in x_val.split(250)])
    network.train()
    right = (outputs.argmax(1) == y_val).float().mean()
    return float(functional.cross_entropy(outputs, y_val)), float(right)


for seed in arguments.seeds:
    torch.manual_seed(seed)
    network = make("wide_resnet")
    model = nn.parallel.DistributedDataParallel(network)
    torch.manual_seed(1000 * seed + rank)
    sgd = torch.optim.SGD(
        model.parameters(),
        curve_data.LEARNING_RATE,
        momentum=0.9,
        nesterov=True,
        weight_decay=2e-4,
    )
    # Its k-th global batch has the same rows on any number of processes.
    sampler = DistributedSampler(rows, seed=seed)
    loader = DataLoader(rows, curve_data.BATCH_SIZE // size, sampler=sampler)
    results = []
    for epoch in range(curve_data.EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            sgd.zero_grad()
            functional.cross_entropy(model(images), labels).backward()
            sgd.step()
        results.append(validate(network) if rank == 0 else (0.0, 0.0))
    curve_data.report(seed, *map(list, zip(*results, strict=True)))
    torch.distributed.barrier()
os._exit(0)
