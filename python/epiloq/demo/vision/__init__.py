"""Second demonstration: the convolutional networks of PP-OCRv4, quantised by each scheme, on rendered text."""
