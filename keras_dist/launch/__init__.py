"""Start the ranks of a job, end all that they have started, and show the first failure.

- `function`: `keras_dist.run`, which calls a function on many ranks
- `command`: the command `keras-dist run`, its options, and which way starts the job
- `job`: the one loop that starts the ranks, watches the hosts, and starts again
- `agent`: what each other host does; by ssh the command `host-agent`
- `ssh`: an agent on each host that the user has named
- `meeting`, `environments`: the same command on each host, by hand or by a scheduler
- `store`, `signing`: the key-value store in which hosts and ranks meet, and its client
- `ranks`: the ranks of one host: start them, watch them, end them
- `processes`: all processes of a job, and the signals that stop it
- `output`, `startup_noise`: what the ranks print, passed on to the terminal or to files
- `failures`: reports, which rank failed first, and the message for the user
- `hosts`, `network`: which rank runs on which host; addresses of this host
- `horovod_library`: what the installed Horovod was built with
- `monitor/`: where each rank is, and whether the job still makes progress
"""
