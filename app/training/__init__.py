"""The page about a training: how a model gets sparse."""
