"""Try on the machines that are there whether all is right: `keras-dist check`, `env`.

The command starts ranks once for each stage, as `keras-dist run` does, and shows what
they report. A stage that dies or hangs is one line that failed.

- `command`: the commands and their options
- `stages`: the stages, their checks, and how long they may take
- `launches`: run a stage, again after the check at which it died
- `result`: what was seen by a check; how a rank reports it to the command
- `screen`: the lines on the terminal
- `worker`: the module that the ranks of a stage run; `reporting`: what they have there
- `facts`: versions, code and system of one rank; `gpus`: what nvidia-smi lists
- `hosts`: addresses, names and clocks of the hosts, without a collective
- `environment`: are the facts of all ranks equal, and do the hosts reach each other?
- `devices`, `collectives`, `truth`, `resume`, `speed`: a stage each
- `links`: what a plain connection between hosts reaches; `gpu_links`: what NVLink and
  PCI Express are to reach
- `models`: what is trained in the last three
"""
