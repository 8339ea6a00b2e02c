"""Verify the installation on these machines: `keras-dist check` and `keras-dist env`.

The command starts ranks once for each stage, as `keras-dist run` does, and shows what
they report. A stage that dies or hangs fails one check; the others have another launch.

- `command`: the commands, their options, and the lines that they show
- `checks`: which checks there are, by stage, and how a rank tries and reports one
- `launches`: run a stage, and again after the check at which it died
- `__main__`: the program of the ranks
- `environment`, `devices`, `collectives`, `truth`, `resume`, `speed`: a stage each
- `network`: addresses, names and clocks of the hosts, without a collective
- `gpus`: the GPUs of a host and what links them, from nvidia-smi
"""
