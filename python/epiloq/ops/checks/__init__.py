"""Checks that go beyond one operation: of `w4a8_mm` and what builds on it, and of problems given as sizes alone."""
