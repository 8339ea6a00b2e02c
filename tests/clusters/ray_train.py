"""`ray_train.py FOLDER FAILURES CASE`: that training on two workers of Ray Train."""

import sys
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.tensorflow import TensorflowTrainer


def train(config):
    """On a worker."""
    from training import train  # noqa: PLC0415 - where Ray has set TF_CONFIG

    train(Path(config["folder"]), config["case"])


folder, failures, case = sys.argv[1:]
ray.init(num_cpus=3, include_dashboard=False)
TensorflowTrainer(
    train,
    train_loop_config={"folder": folder, "case": case},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(
        storage_path=f"{folder}/ray",
        failure_config=FailureConfig(max_failures=int(failures)),
    ),
).fit()
