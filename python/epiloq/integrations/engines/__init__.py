"""Shared by the plug-ins for serving engines; imports no engine."""
