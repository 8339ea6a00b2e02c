"""Start the ranks of a job, end all that they have started, and show the first failure.

- `function`: `keras_dist.run`, which calls a function on many ranks
- `command`: the command `keras-dist run`: its options, and the hosts of the job
- `job`: one launcher on each host, and on the first one the verdict on all
- `meeting`: what the launchers, or ranks of other launchers, give each other
- `ssh`: types the command on hosts that the user has named
- `store`, `signing`: the job's key-value store, its client, and the numbers of ranks
- `ranks`: the ranks of one host: start them, watch them, end all they have started
- `time_limits`: how long a job waits
- `output`: what the ranks print, passed on to the terminal or to files
- `failures`: the end of each rank, and the message about the first failure
- `hosts`: names and addresses of hosts, GPUs
- `monitor/`: where each rank is, and whether the job still makes progress
"""
