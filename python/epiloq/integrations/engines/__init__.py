"""What the plug-ins for serving engines share. Nothing here imports an engine."""
