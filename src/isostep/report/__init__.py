"""Reports of a run: pictures for the terminal, live progress, trackers. Only TensorBoard's writer needs torch."""
