"""What the loss says when something is taken away from a model."""
