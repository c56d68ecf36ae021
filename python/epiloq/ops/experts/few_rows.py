"""When one kernel multiplies all experts of a mixture."""

_MANY_ROWS = 64
INTEGER_MULTIPLICATIONS, FP4_MULTIPLICATIONS = 5e9, 2.5e10
"""Of an expert's rows, in the time that the host needs to launch the products of one expert. Measured on an H200: 37 us
for integers, whose separate products are twice as fast, and 90 us for FP4, which is dequantised."""


def are_few(rows: float, n: int, k: int, multiplications: float) -> bool:
    """Whether for `rows` rows of an expert on average, times a matrix ``[n, k]`` of its own, the kernel that multiplies
    all experts is faster than products of one expert after the other."""
    return rows <= _MANY_ROWS or rows * n * k <= multiplications
