"""The output of a run: the terminal, records, plots, TensorBoard events, comparisons."""
