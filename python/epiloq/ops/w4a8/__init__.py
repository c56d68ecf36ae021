"""How `w4a8_mm` multiplies where `weight_only_mm` and its own kernel do not."""
