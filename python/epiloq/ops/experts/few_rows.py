"""When one kernel multiplies all experts of a mixture."""

_MANY_ROWS = 64
INTEGER_MULTIPLICATIONS, FP4_MULTIPLICATIONS = 5e9, 2.5e10
"""Of an expert's rows, up to which the kernel of all experts takes less. Measured on an H200: separate products of
integers are twice as fast, but the host needs 36 us to launch those of an expert. FP4, which is dequantised first,
takes 57 us or more; one kernel is faster for 1.5e10, separate products are for 3e10."""


def are_few(rows: float, n: int, k: int, multiplications: float) -> bool:
    """Whether for `rows` rows of an expert on average, times a matrix ``[n, k]`` of its own, the kernel that multiplies
    all experts is faster than products of one expert after the other."""
    return rows <= _MANY_ROWS or rows * n * k <= multiplications
