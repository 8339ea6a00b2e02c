"""bayesflow: amortized inference by a coupling flow, which standardizes its data."""

import bayesflow
import keras
import numpy as np

keras.utils.set_random_seed(1)


def prior():
    return {"theta": np.random.normal(size=2)}


def likelihood(theta):
    return {"x": np.random.normal(theta, 0.3, size=2)}


simulator = bayesflow.make_simulator([prior, likelihood])
workflow = bayesflow.BasicWorkflow(
    simulator=simulator,
    inference_network=bayesflow.networks.CouplingFlow(
        depth=2, subnet_kwargs={"widths": (8,), "dropout": 0}
    ),
    inference_variables="theta",
    inference_conditions="x",
    standardize="all",
)
data = simulator.sample(96)
workflow.fit_offline(data, epochs=3, batch_size=32, verbose=0)
for weight in workflow.approximator.get_weights():
    print("weights", *weight.ravel())
