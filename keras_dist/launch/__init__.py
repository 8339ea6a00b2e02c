"""Start the ranks of a job, end all that they have started, and show the first failure.

One protocol, many starters: a starter gets an agent running on each host; the agent
joins the store of the job and does what the coordinator orders; the coordinator numbers
the ranks, watches them, and is the only loop that starts them again.

- `function`: `keras_dist.run`, which calls a function on many ranks
- `command`: the command `keras-dist run`, its options, and which way starts the job
- `coordinator`: one start after the other, and the first cause of each failure
- `joined`: hosts whose agents have joined the store, and which are lost; `Starter`
- `agent`: what each host does, and its heartbeats; by ssh the command `host-agent`
- `store`: the key-value store in which hosts and ranks meet, and its client
- `signing`: signatures and derived secrets
- `restarts`: how often and when a job is started again; hosts that are left out

Ways to start:

- `local`: this machine alone, with the launcher's own process in the agent's place
- `ssh`: an agent on each host that is listed, or that a script names
- `meeting`: the same command on each host, by hand or by a scheduler
- `environments/`: what schedulers say in their variables
- `slurm_task`: tasks of SLURM that are ranks

The ranks of one host:

- `ranks`: what they run; start them, watch them, end them
- `processes`: all processes of a job, and the signals that stop it
- `output`, `startup_noise`: what the ranks print, passed on to the terminal or to files
- `failures`: reports, which rank failed first, and the message for the user
- `hosts`, `network`: which rank runs on which host; addresses of this host

Beside the path: `horovod_library` (what the installed Horovod was built with) and
`monitor/` (where each rank is, and whether the job still makes progress).
"""
