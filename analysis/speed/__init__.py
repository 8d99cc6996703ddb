"""The worth of sparsity in time: speedups, contributions, tiles, unions, compression."""
