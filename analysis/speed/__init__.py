"""What sparsity is worth in time: speedups, contributions, tiles, unions, compression."""
