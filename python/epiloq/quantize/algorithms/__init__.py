"""The algorithms: AWQ, GPTQ, SmoothQuant, and the table of their names."""
