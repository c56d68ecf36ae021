"""How many tiles groupwise_mm's tables for SM90 have (src/ops/groupwise_mm/configs.h), which tests have to reach."""

GROUPS = 11
COLUMNS = 3  # with a scale a column
INT8 = 12  # with scales of whole rows, as the next
FLOAT8 = 10
