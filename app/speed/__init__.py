"""Page Kernels."""
