"""Training sets, solvers and the methods' objectives. Nothing here knows a file or a console."""
