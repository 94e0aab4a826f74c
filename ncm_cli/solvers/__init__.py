"""What `fit`, `sweep` and networks solve with. Nothing here knows a file or a console."""
