"""How many tiles groupwise_mm has for SM90 (src/dispatch/groupwise_mm/tables.h), which tests have to reach."""

GROUPS = 11  # with a scale per 128 columns of B
COLUMNS = 3  # with scales per column of B
WHOLE_ROWS = 3  # the same where A has a scale per row for all of K
INT8 = 12  # with scales per row
FLOAT8 = 10  # with scales per row
FOR_EXPERTS = 1  # more of each but COLUMNS and WHOLE_ROWS, with experts
