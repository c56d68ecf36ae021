"""How many tiles groupwise_mm has for SM90 (src/dispatch/groupwise_mm/tables.h), which tests have to reach."""

GROUPS = 11
COLUMNS = 3  # with a scale a column
INT8 = 12  # with scales of whole rows, as the next
FLOAT8 = 10
