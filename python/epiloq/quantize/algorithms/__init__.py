"""The algorithms (AWQ, GPTQ, SmoothQuant and others) and the table of their names."""
