"""The GPU back end: Triton kernels whose bits never follow the batch."""
