"""Ways to run the op: one file a kernel, each with the same signature as `reference`."""
