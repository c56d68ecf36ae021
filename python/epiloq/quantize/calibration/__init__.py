"""Block-wise calibration of a model, and statistics of its layers' inputs."""
