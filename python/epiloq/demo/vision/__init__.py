"""The second demonstration: PP-OCRv4's convolutional networks, quantised by each scheme, on images of drawn text."""
