"""One model over several processes of a machine: heads, MLP widths and the vocabulary are divided (tensor parallelism)."""
