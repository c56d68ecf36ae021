"""Products of `w4a8_mm` for which neither `weight_only_mm` nor its own kernel is used."""
