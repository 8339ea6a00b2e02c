"""TF_CONFIG: Ray Train's `TensorflowTrainer`, TFJob, Vertex AI, SageMaker."""

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from keras_dist.clusters.cluster import Cluster, Place


class TfConfig(Cluster):
    """A cluster of workers, and of a chief where there is one, which is rank 0."""

    name: ClassVar[str] = "TF_CONFIG"
    key: ClassVar[str] = "tf_config"

    def is_here(self, environ: Mapping[str, str]) -> bool:
        text = environ.get("TF_CONFIG", "")
        return bool(text) and len(_parse(text)[0]) > 1

    def place(self, environ: Mapping[str, str]) -> Place:
        workers, task = _parse(environ["TF_CONFIG"])
        key = str(task.get("type")), task["index"]
        if key not in workers:
            raise ValueError(
                "This process is not one of the workers that train. Received: the task "
                f"{task} in TF_CONFIG, with the ranks {list(workers)}. There are "
                "no parameter servers and no evaluator here: start workers alone, of "
                "which one may be the chief."
            )
        rank = list(workers).index(key)
        hosts = [address.rpartition(":")[0] for address in workers.values()]
        address, _, port = next(iter(workers.values())).rpartition(":")
        return Place(
            launcher=self.name,
            rank=rank,
            size=len(workers),
            local_rank=hosts[:rank].count(hosts[rank]),
            local_size=hosts.count(hosts[rank]),
            address=address,
            port=int(port),  # which TensorFlow does not use here
            variables=("TF_CONFIG",),
        )


def _parse(text: str) -> tuple[dict[tuple[str, int], str], dict[str, Any]]:
    """Return the address of each rank by its type and index, and this task."""
    try:
        config = json.loads(text)
        cluster, task = config.get("cluster", {}), config.get("task", {})
        workers = {
            (role, index): address
            for role in ("chief", "master", "worker")  # the first rank comes first
            for index, address in enumerate(cluster.get(role, []))
        }
        task["index"] = int(task.get("index", 0))
        [int(address.rpartition(":")[2]) for address in workers.values()]
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"TF_CONFIG does not describe a cluster. Received: {text!r} "
            f"({type(error).__name__}: {error}). Unset it to train on one process."
        ) from error
    return workers, task
