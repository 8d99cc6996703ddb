"""The change of the loss when something is taken away from a model."""
