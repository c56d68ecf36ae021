"""Other projects' kernels beside which operations are timed, and Triton kernels written for comparison."""
