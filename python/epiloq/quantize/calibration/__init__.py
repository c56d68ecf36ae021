"""Running a model block by block to calibrate it, and what its layers' inputs look like."""
