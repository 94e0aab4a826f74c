"""The options of every command, declared once: see `spec`."""
