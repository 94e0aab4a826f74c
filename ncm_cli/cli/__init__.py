"""The command line: each command parses, calls one stage and renders."""
