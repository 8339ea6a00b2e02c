"""Verify the installation on these machines: `keras-dist check` and `keras-dist env`.

- `command`: the two commands, and the lines that they print
- `host`: the outcome of one check; what is installed on this host, without ranks
- `ranks`: the program of the ranks: their devices, their sums, a small training
"""
