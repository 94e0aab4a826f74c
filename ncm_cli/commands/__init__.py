"""One module a command: ``show(found, ui)`` shows its result; ``run(options, ui)`` also does the work."""
