"""One module a command: ``run(options, ui)`` does it by one call and shows the result."""
