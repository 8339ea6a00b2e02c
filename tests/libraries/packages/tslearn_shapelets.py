"""tslearn: `LearningShapelets`."""

from tslearn.generators import random_walk_blobs
from tslearn.shapelets import LearningShapelets

x, y = random_walk_blobs(n_ts_per_blob=20, sz=32, d=1, n_blobs=3, random_state=1)
model = LearningShapelets(
    n_shapelets_per_size={4: 3, 8: 2},
    optimizer="adam",
    max_iter=5,
    batch_size=16,
    weight_regularizer=0.01,
    scale=True,
    random_state=1,
)
model.fit(x, y)
print("score", model.score(x, y))
for weight in model.model_.get_weights():
    print("weights", *weight.ravel())
