"""Verify the installation on these machines: `keras-dist check` and `keras-dist env`.

- `command`: the two commands, and the lines that they print
- `host`: what is installed on this host, without ranks
- `ranks`: the program of the ranks: their devices, their sums, a small training
- `results`: the outcome of one check, passed from a rank to the command
"""
