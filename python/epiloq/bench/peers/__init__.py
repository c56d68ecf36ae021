"""Other projects' kernels that operations are compared with, and Triton kernels written for comparison."""
