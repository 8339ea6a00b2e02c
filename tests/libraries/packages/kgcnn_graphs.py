"""kgcnn: a graph network (GCN) on graphs of 4 to 8 nodes, padded."""

import keras
import numpy as np
from kgcnn.literature.GCN import make_model

keras.utils.set_random_seed(1)
random = np.random.default_rng(1)
rows, size = 60, 8
nodes = random.integers(4, size + 1, rows)
numbers = random.integers(1, 10, (rows, size))
edges = np.stack(
    [np.tile(np.arange(size), 2), np.roll(np.tile(np.arange(size), 2), 1)], 1
)
edges = np.tile(edges, (rows, 1, 1)) % nodes[:, None, None]
x = {
    "node_number": numbers,
    "edge_weights": np.ones((rows, 2 * size, 1), "float32"),
    "edge_indices": edges,
    "total_nodes": nodes,
    "total_edges": np.full(rows, 2 * size),
}
y = np.where(np.arange(size) < nodes[:, None], numbers, 0).sum(1, keepdims=True) / 40
model = make_model(
    gcn_args={
        "units": 8,
        "use_bias": True,
        "activation": "relu",
        "pooling_method": "sum",
    },
    input_node_embedding={"input_dim": 10, "output_dim": 8},
    depth=2,
    verbose=0,
    output_mlp={
        "use_bias": [True, False],
        "units": [8, 1],
        "activation": ["relu", "linear"],
    },
)
model.compile(keras.optimizers.Adam(0.01), "mean_squared_error", metrics=["mae"])
model.fit(x, y, batch_size=16, epochs=3, validation_split=0.2, verbose=0)
print("predicted", model.predict(x, verbose=0).mean())
for weight in model.get_weights():
    print("weights", *weight.ravel())
