"""Checks of arguments of operations that have no C++ of their own yet."""
