"""`twell train`: sparse language models, from a recipe and a text to a checkpoint."""
