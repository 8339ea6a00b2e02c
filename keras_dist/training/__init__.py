"""What a model does in a step, an evaluation and a prediction."""
