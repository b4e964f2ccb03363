"""What a run shows and leaves: the terminal, records, plots, TensorBoard events, comparisons."""
